//! The date that a chat template may ask for, formatted as Python's `strftime` does in English.
//!
//! Only days and times in UTC: a template that prints the date wants a sentence, not a calendar.

/// What `strftime_now` in a chat template answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clock {
    /// The time at which the template is rendered.
    Now,
    /// Seconds since 1970-01-01 00:00 UTC.
    Fixed(i64),
}

impl Clock {
    /// The clock of calibration and evaluation text: 26 July 2024, the date that Llama's template
    /// itself falls back to. With a moving date the same command would give other token ids
    /// tomorrow, and an unfinished run could not go on after midnight.
    pub const CALIBRATION: Self = Self::Fixed(1_721_952_000);

    pub(crate) fn format(self, format: &str) -> String {
        strftime(format, self.seconds())
    }

    fn seconds(self) -> i64 {
        match self {
            Self::Fixed(seconds) => seconds,
            Self::Now => web_time::SystemTime::now()
                .duration_since(web_time::UNIX_EPOCH)
                .map_or(0, |elapsed| elapsed.as_secs() as i64),
        }
    }
}

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Formats a time in UTC. A directive that is not known stays as it is written, as in C.
fn strftime(format: &str, seconds: i64) -> String {
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let hour12 = (hour + 11) % 12 + 1;
    let weekday = DAYS[(days + 4).rem_euclid(7) as usize];
    let month_name = MONTHS[month as usize - 1];
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let Some(mut directive) = chars.next() else {
            out.push('%');
            break;
        };
        // "%-d" is the glibc way to ask for no leading zero.
        let padded = directive != '-';
        if !padded {
            directive = chars.next().unwrap_or('-');
        }
        let number = |value: i64, width: usize| match padded {
            true => format!("{value:0width$}"),
            false => value.to_string(),
        };
        let text = match directive {
            'Y' => number(year, 4),
            'y' => number(year.rem_euclid(100), 2),
            'm' => number(month, 2),
            'd' => number(day, 2),
            'j' => number(days - days_from_civil(year, 1, 1) + 1, 3),
            'H' => number(hour, 2),
            'I' => number(hour12, 2),
            'M' => number(minute, 2),
            'S' => number(second, 2),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_string(),
            'B' => month_name.to_string(),
            'b' | 'h' => month_name[..3].to_string(),
            'A' => weekday.to_string(),
            'a' => weekday[..3].to_string(),
            'F' => strftime("%Y-%m-%d", seconds),
            'T' => strftime("%H:%M:%S", seconds),
            'Z' => "UTC".to_string(),
            'z' => "+0000".to_string(),
            '%' => "%".to_string(),
            other => format!("%{}{other}", if padded { "" } else { "-" }),
        };
        out.push_str(&text);
    }
    out
}

/// Year, month (1–12) and day (1–31) of a number of days since 1970-01-01, in the Gregorian
/// calendar. Years are counted from March, so that the leap day is the last of its year.
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}

/// The inverse of [`civil`].
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let month_from_march = (month + 9) % 12;
    let day_of_year = (153 * month_from_march + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_like_python() {
        // Expected strings from Python's datetime.fromtimestamp(s, timezone.utc).strftime.
        assert_eq!(Clock::CALIBRATION.format("%d %b %Y"), "26 Jul 2024");
        assert_eq!(strftime("%Y-%m-%d %H:%M:%S", 0), "1970-01-01 00:00:00");
        assert_eq!(
            strftime("%A %a, %B %-d %y, %j, %I:%M %p %F %T", 951_782_399),
            "Monday Mon, February 28 00, 059, 11:59 PM 2000-02-28 23:59:59"
        );
        assert_eq!(strftime("%d/%m/%Y", 951_782_400), "29/02/2000");
        assert_eq!(strftime("%H %I %p", 43_200), "12 12 PM");
        assert_eq!(strftime("%H %I %p", 0), "00 12 AM");
        assert_eq!(strftime("100%% %Q %", 0), "100% %Q %");
    }

    #[test]
    fn dates_survive_a_round_trip_through_four_centuries() {
        for days in (-10_000..140_000).step_by(17) {
            let (year, month, day) = civil(days);
            assert_eq!(days_from_civil(year, month, day), days);
        }
    }

    #[test]
    fn now_is_after_this_was_written() {
        assert!(Clock::Now.format("%Y").as_str() >= "2025");
    }
}
