"""`make peers`: what other programs make of Halftone's files, and Halftone of theirs.

    python tests/peers/run.py --model DIR --work DIR [--parts schemes,families,theirs,broken,quality]

The part quality takes an hour or more and is only done when it is named. Writes results.md and results.json into the work directory. Exit code 1 if anything failed that is not known.
"""

import argparse
import importlib.util
import json
import pathlib
import sys
import tempfile

import ours


NEEDED = ["torch", "transformers", "optimum", "gptqmodel", "compressed_tensors", "llmcompressor", "datasets"]
PARTS = ["schemes", "families", "theirs", "broken", "quality"]
# Without being named; quality takes an hour or more.
DEFAULT = PARTS[:-1]


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, required=True, help="a Hugging Face directory in 16 bits")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="where results go")
    parser.add_argument("--parts", default=",".join(DEFAULT), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--only", default="", help="schemes, families or settings whose name has this in it")
    options = parser.add_argument_group("part quality")
    demo = ours.ROOT / "web" / "demo"
    options.add_argument("--calibration", type=pathlib.Path, default=demo / "calibration.txt", help="a text")
    options.add_argument("--evaluation", type=pathlib.Path, default=demo / "evaluation.txt", help="another text")
    options.add_argument("--samples", type=int, default=32, help="of the calibration text")
    options.add_argument("--seq-len", type=int, default=512, help="tokens of a sample")
    options.add_argument("--group-size", type=int, default=64)
    options.add_argument("--bits", default="4,3", help="some of 2,3,4,8")
    options.add_argument("--seeds", default="0", help="such as 0,1,2; each draws other samples")
    return parser.parse_args()


def main():
    arguments = parse()
    parts = arguments.parts.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        sys.exit(f"there is no part {', '.join(unknown)}, only {', '.join(PARTS)}")
    if not pathlib.Path(ours.PROGRAM).exists():
        sys.exit(f"{ours.PROGRAM} is not there: build it, or name it by HALFTONE=")
    arguments.work.mkdir(parents=True, exist_ok=True)

    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"{sys.executable} has no {', '.join(missing)}: pip install -r tests/peers/requirements.txt, then --no-deps -r tests/peers/requirements-alone.txt")
    if not (arguments.model / "config.json").exists():
        sys.exit(f"{arguments.model} is no model directory: there is no config.json")

    import report
    import texts

    rows = texts.rows_of(arguments.model)
    name = arguments.model.absolute().name
    document = report.Document(arguments.work)
    with tempfile.TemporaryDirectory(dir=arguments.work) as scratch:
        scratch = pathlib.Path(scratch)
        if "schemes" in parts:
            import schemes

            chosen = {key: value for key, value in schemes.SCHEMES.items() if arguments.only in key}
            document.schemes(schemes.of_model(arguments.model, name, rows, scratch, chosen, tell=report.tell))
        if "families" in parts:
            import families

            document.families(families.all(scratch, arguments.only, tell=report.tell))
        if "theirs" in parts:
            import theirs

            document.theirs(theirs.all(arguments.model, name, rows, scratch, tell=report.tell))
        if "broken" in parts:
            import broken

            document.broken(broken.all(arguments.model, rows, scratch, tell=report.tell))
        if "quality" in parts:
            import quality

            document.quality(*quality.all(arguments, name, scratch, tell=report.tell))
    document.write()
    print(f"\n{document.failed} failed of {document.count}; {arguments.work}/results.md has the tables")
    return 1 if document.failed else 0


if __name__ == "__main__":
    sys.exit(main())
