//! Plain tables: columns aligned, numbers to the right.

/// Prints `rows` under `header`; a cell that starts with a digit, a minus or a dash goes right.
pub fn print(header: &[&str], rows: &[Vec<String>]) {
    say!("{}", render(header, rows).trim_end());
}

pub fn render(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([header[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let numeric: Vec<bool> = (0..header.len())
        .map(|column| {
            let mut cells = rows.iter().filter_map(|row| row.get(column)).filter(|cell| !cell.is_empty());
            cells.all(|cell| cell.starts_with(|c: char| c.is_ascii_digit() || c == '-'))
        })
        .collect();
    let line = |cells: Vec<&str>| {
        let mut text = String::new();
        for (column, cell) in cells.into_iter().enumerate() {
            let pad = " ".repeat(widths[column].saturating_sub(cell.chars().count()));
            let gap = if column == 0 { "" } else { "  " };
            let cell =
                if numeric[column] { format!("{gap}{pad}{cell}") } else { format!("{gap}{cell}{pad}") };
            text.push_str(&cell);
        }
        format!("{}\n", text.trim_end())
    };
    let mut text = line(header.to_vec());
    for row in rows {
        text.push_str(&line(row.iter().map(String::as_str).collect()));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_go_right_and_words_left() {
        let rows = [vec!["a".into(), "10".into()], vec!["long".into(), "9".into()]];
        assert_eq!(render(&["name", "n"], &rows), "name   n\na     10\nlong   9\n");
    }
}
