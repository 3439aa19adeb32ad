"""What is tracked: no paths of one machine, nothing heavy, one version said in several places."""

import re
import subprocess
from pathlib import Path

import pytest

root = Path(__file__).resolve().parents[2]
FILE_MB, TREE_MB = 10, 90
TEXT = {
    ".py",
    ".ipynb",
    ".md",
    ".toml",
    ".ini",
    ".typ",
    ".cfg",
    ".cff",
    ".yml",
    ".txt",
    ".json",
    ".csv",
    ".bib",
    ".svg",
    "",
}
# Written in pieces, so that this file does not find itself.
MACHINE_PATH = re.compile(
    r"(?<![\w.])/(?:"
    + "|".join(["root", "work", "workspace", "farm", "tmp/[a-z]{3,}", "mnt", "home/[a-z]", "Users/[A-Za-z]"])
    + r")[/\w]|\.py"
    + r"env\b|site-"
    + r"packages/|C:\\\\?Users"
)


def tracked():
    "Files under version control; without git, none."
    done = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True)
    return [root / f for f in done.stdout.split("\0") if f and (root / f).is_file()]


def paths_in(
    text,  # content of a file
):  # list of excerpts
    "Machine paths in a text; embedded pictures are not text."
    text = re.sub(r'"image/(?:png|jpeg)": "[^"]*"', "", text)
    return [text[max(0, m.start() - 30) : m.end() + 30] for m in MACHINE_PATH.finditer(text)]


files = tracked()
needs_git = pytest.mark.skipif(not files, reason="not a git clone: nothing says which files belong to it")


@needs_git
def test_no_machine_paths():
    found = [
        f"{f.relative_to(root)}: ...{p!r}..."
        for f in files
        if f.suffix in TEXT
        for p in paths_in(f.read_text(errors="replace"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text, n",
    [
        ("open('/ro" + "ot/x')", 1),
        ("see /ho" + "me/ada/run", 1),
        ("/tm" + "p/abc/pack", 1),
        ("lib/python3/site-pack" + "ages/torch", 1),
        ("/Us" + "ers/Ada", 1),
        ("https://example.org/home/x", 0),
        ("nbs/../data/work/x", 0),
        ("a path such as /path/to/python", 0),
        ('"image/png": "iVBO/ro' + 'ot/9"', 0),
    ],
)
def test_machine_paths_are_recognised(text, n):
    assert len(paths_in(text)) == n


@needs_git
def test_tracked_files_are_small():
    mb = {f.relative_to(root).as_posix(): f.stat().st_size / 1e6 for f in files}
    heavy = {f: round(s, 1) for f, s in mb.items() if s > FILE_MB}
    assert not heavy, f"over {FILE_MB} MB each: {heavy}; keep results compact, and packs in int8"
    assert sum(mb.values()) <= TREE_MB, f"the tracked files are {sum(mb.values()):.0f} MB; at most {TREE_MB}"


def test_one_version():
    def said(file, pattern):
        return re.search(pattern, (root / file).read_text(), re.M)[1]

    versions = {
        "settings.ini": said("settings.ini", r"^version = (.+)$"),
        "ega/__init__.py": said("ega/__init__.py", r'^__version__ = "(.+)"'),
        "CITATION.cff": said("CITATION.cff", r"^version: (.+)$"),
        "CHANGELOG.md": said("CHANGELOG.md", r"^## \[?([\d.]+)"),
    }
    assert len(set(versions.values())) == 1, versions


def test_security_names_existing_tests():
    "SECURITY.md says what is promised and what shows it."
    known = {
        name
        for f in (root / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", f.read_text(), re.M)
    } | {f.stem for f in (root / "tests").rglob("test_*.py")}
    named = re.findall(r"`(test_\w+)(?:\.py)?`", (root / "SECURITY.md").read_text())
    assert len(named) > 9 and not set(named) - known
