#!/usr/bin/env python3
"""Makes the manual as a site: `scripts/site.py [DIR]`, target/site by default.

The documents are taken as they are; the navigation is that of docs/SUMMARY.md. Ends with 1 where a link leads
nowhere. It needs mkdocs-material; `make docs` installs it into the checkout's own environment.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
# What is on the site besides docs.
BESIDE = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "bench"]
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")


def navigation():
    """The parts and pages of docs/SUMMARY.md, as mkdocs wants them."""
    parts, last = [{"rampool": "README.md"}], None
    for line in (ROOT / "docs/SUMMARY.md").read_text().splitlines():
        if part := re.fullmatch(r"# (?!Summary)(.+)", line):
            parts.append({part.group(1): (pages := [])})
        elif page := re.fullmatch(r"( *)- \[(.+)\]\((.+)\)", line):
            inner, title, path = page.groups()
            if inner and isinstance(last, dict):
                name, value = next(iter(last.items()))
                last[name] = (value if isinstance(value, list) else [value]) + [{title: f"docs/{path}"}]
            else:
                pages.append(last := {title: f"docs/{path}"})
    parts.append({"Figures": [{"Figures": "bench/figures.md"}, {"Notebook": "bench/notebook.md"}]})
    parts.append(
        {
            "Project": [
                {"Architecture": "ARCHITECTURE.md"},
                {"Contributing": "CONTRIBUTING.md"},
                {"Changes": "CHANGELOG.md"},
                {"Security": "SECURITY.md"},
            ]
        }
    )
    return parts


def stage(to):
    """Copies the documents to where they have the same relative paths, and takes links to source out."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(ROOT / "docs", to / "docs")
    for name in BESIDE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, to / name)
    for page in to.rglob("*.md"):
        here = page.parent

        def kept(link):
            if "://" in link.group(2) or (here / link.group(2)).is_file():
                return link.group()
            original = (ROOT / here.relative_to(to) / link.group(2)).resolve()
            # A file or folder of the source: its path is what a reader can use.
            return f"](source:{original.relative_to(ROOT)})" if original.exists() else link.group()

        # The site knows languages, not how their examples are tested.
        text = re.sub(r"^(\s*```\w+),\S+$", r"\1", LINK.sub(kept, page.read_text()), flags=re.M)
        page.write_text(re.sub(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(source:([^)]*)\)", r"\1", text))


def main():
    to = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else TARGET / "site").resolve()
    work = TARGET / "site-source"
    stage(work / "pages")
    settings = {
        "site_name": "rampool",
        "site_description": "The RAM of many machines, as one pool, for any program",
        "docs_dir": str(work / "pages"),
        "site_dir": str(to),
        "use_directory_urls": False,
        "nav": navigation(),
        "strict": True,
        "theme": {
            "name": "material",
            # Nothing is loaded from elsewhere.
            "font": False,
            "features": ["navigation.sections", "navigation.top", "content.code.copy", "search.suggest"],
            "palette": [
                {
                    "media": "(prefers-color-scheme: light)",
                    "scheme": "default",
                    "toggle": {"icon": "material/weather-night", "name": "dark"},
                },
                {
                    "media": "(prefers-color-scheme: dark)",
                    "scheme": "slate",
                    "toggle": {"icon": "material/weather-sunny", "name": "light"},
                },
            ],
        },
        "plugins": ["search"],
        "not_in_nav": "docs/SUMMARY.md\n",
        "validation": {
            "links": {
                "anchors": "warn",
                "not_found": "warn",
                "absolute_links": "warn",
                "unrecognized_links": "warn",
            }
        },
        "markdown_extensions": ["tables", "toc", "pymdownx.superfences", "pymdownx.highlight"],
    }
    # mkdocs reads YAML, of which JSON is a part.
    (work / "mkdocs.yml").write_text(json.dumps(settings, indent=1))
    command = [sys.executable, "-m", "mkdocs", "build", "--clean", "--config-file", work / "mkdocs.yml"]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout + done.stderr, file=sys.stderr)
        return 1
    print(f"site: {to}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
