"""The examples of the guide run."""

import pathlib
import re

GUIDE = pathlib.Path(__file__).resolve().parent.parent.parent / "docs/guide/python.md"


def test_the_guides_examples(server):
    examples = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    assert len(examples) > 6
    names = {}
    for example in examples:
        exec(compile(example.replace('"memhost1"', repr(server)), str(GUIDE), "exec"), names)
