"""`make peers`: what other programs make of Halftone's files, and Halftone of theirs.

    python tests/peers/run.py --model DIR --work DIR [--parts schemes,families,theirs,broken]

Writes results.md and results.json into the work directory. Exit code 1 if anything failed that is not known.
"""

import argparse
import importlib.util
import json
import pathlib
import sys
import tempfile

import ours


NEEDED = ["torch", "transformers", "optimum", "gptqmodel", "compressed_tensors", "llmcompressor", "datasets"]
PARTS = "schemes,families,theirs,broken"


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, required=True, help="a Hugging Face directory in 16 bits")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="where results go")
    parser.add_argument("--parts", default=PARTS, help=f"some of {PARTS}")
    parser.add_argument("--only", default="", help="schemes or families whose name has this in it")
    return parser.parse_args()


def main():
    arguments = parse()
    parts = arguments.parts.split(",")
    if not pathlib.Path(ours.PROGRAM).exists():
        sys.exit(f"{ours.PROGRAM} is not there: build it, or name it by HALFTONE=")
    arguments.work.mkdir(parents=True, exist_ok=True)

    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"{sys.executable} has no {', '.join(missing)}: pip install -r tests/peers/requirements.txt")
    if not (arguments.model / "config.json").exists():
        sys.exit(f"{arguments.model} is no model directory: there is no config.json")

    import report
    import texts

    rows = texts.rows_of(arguments.model)
    name = arguments.model.resolve().name
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
    document.write()
    print(f"\n{document.failed} failed of {document.count}; {arguments.work}/results.md has the tables")
    return 1 if document.failed else 0


if __name__ == "__main__":
    sys.exit(main())
