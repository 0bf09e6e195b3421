"""The examples of the guide and the tutorial run."""

import ast
import json
import pathlib
import re

import rampool

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
GUIDE = ROOT / "docs/guide/python.md"
TUTORIAL = ROOT / "examples/python/tutorial.ipynb"


def test_the_guides_examples(server):
    examples = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    assert len(examples) > 6
    names = {}
    for example in examples:
        exec(compile(example.replace('"memhost1"', repr(server)), str(GUIDE), "exec"), names)


def test_the_tutorial(server, monkeypatch):
    """Cell by cell, as a notebook does it: what a cell's last line gives is shown."""
    monkeypatch.setenv("RAMPOOL_SERVERS", server)
    names, shown = {}, []
    for cell in json.loads(TUTORIAL.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, str(TUTORIAL), "exec"), names)
        if last is not None:
            shown.append(eval(compile(ast.Expression(last.value), str(TUTORIAL), "eval"), names))
    assert shown[0] == 17_000
    pictures = [each for each in shown if isinstance(each, rampool.Picture)]
    assert len(pictures) == 1 and pictures[0]._repr_svg_().endswith("</svg>")
