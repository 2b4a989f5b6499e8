"""The book's own checks, with nothing but the standard library.

    book.py links            every relative link and #anchor in the book and the documents beside it leads somewhere,
                             and every chapter is in the table of contents
    book.py names            every file, test and step of `.ci/run` that they name is there
    book.py html DIR         the same for every page of the built book
    book.py code LANG FILE   prints what the ```LANG blocks of a chapter come to, one after the other

Links to other hosts are not followed.
"""
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```.*?^```\s*$", re.S | re.M)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^\[[^\]]+\]:\s+(\S+)", re.M)


def prose(text: str) -> str:
    """Without code, in which brackets are no links; line by line as before."""
    text = FENCE.sub(lambda m: "\n" * m.group().count("\n"), text)
    return re.sub(r"(`+)(?:(?!\1).)+?\1", lambda m: re.sub(r"[\[\]()]", "_", m.group()), text)


def anchors(text: str) -> set[str]:
    """What mdBook and GitHub call a page's headings: both count further ones of the same text from 1."""
    seen: dict[str, int] = {}
    found = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*#*$", FENCE.sub("", text), re.M):
        explicit = re.search(r"\{#([^}]+)\}$", heading)
        if explicit:
            found.add(explicit.group(1))
            continue
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = "".join(c for c in heading.lower().replace(" ", "-") if c.isalnum() or c in "-_")
        n = seen.get(slug, 0)
        seen[slug] = n + 1
        found.add(f"{slug}-{n}" if n else slug)
    return found


def links() -> int:
    book = sorted((ROOT / "docs").rglob("*.md"))
    pages = [ROOT / n for n in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + book
    bad, count = [], 0
    for page in pages:
        text = page.read_text()
        plain = prose(text)
        for match in [*LINK.finditer(plain), *REFERENCE.finditer(plain)]:
            target = match.group(1)
            if re.match(r"[a-z][a-z0-9+.-]*:", target):
                continue
            count += 1
            where = f"{page.relative_to(ROOT)}:{plain.count(chr(10), 0, match.start()) + 1}"
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists():
                bad.append(f"{where}: there is no {target}")
            elif page in book and not file.is_relative_to(ROOT / "docs"):
                bad.append(f"{where}: {target} is not in the book, where such a link leads nowhere; name the file")
            elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
                bad.append(f"{where}: {file.relative_to(ROOT)} has no heading #{anchor}")
    contents = (ROOT / "docs/SUMMARY.md").read_text()
    listed = {(ROOT / "docs" / m).resolve() for m in LINK.findall(contents)}
    for page in book:
        if page.name != "SUMMARY.md" and page.resolve() not in listed:
            bad.append(f"docs/SUMMARY.md: {page.relative_to(ROOT)} is in the folder and not in the book")
    print("\n".join(bad) or f"{count} links in {len(pages)} pages lead somewhere")
    return bool(bad)


# What functions of other libraries begin with, and pages that name others' files.
OTHERS = ("ibv_", "rdma_")
ABOUT_OTHERS = {"docs/comparison.md": ("src/",), "docs/start.md": ("src/main.rs",)}


def names() -> int:
    sources = "".join(f.read_text() for d in ("src", "tests") for f in (ROOT / d).rglob("*.rs"))
    functions = set(re.findall(r"\bfn (\w+)", sources))
    functions |= {f.removeprefix("loom_") for f in functions}
    tests = {f.stem: f for f in (ROOT / "tests").glob("*.rs")}
    script = (ROOT / ".ci/run").read_text()
    steps = set(re.findall(r"^(\w+)\(\) \{", script, re.M))
    bad, count = [], 0

    def known(name: str, among) -> bool:
        return any(n.startswith(name[:-1]) for n in among) if name.endswith("*") else name in among

    def missing(token: str) -> str | None:
        nonlocal count
        if re.fullmatch(r"(src|tests|examples|benches|docs|include|fuzz|\.ci)/[\w./-]+", token):
            count += 1
            return None if (ROOT / token).exists() else "there is no such file"
        if match := re.fullmatch(r"((?:host|verbs)_\w*\*?)(?:::(\w+\*?))?", token):
            count += 1
            file, function = match.groups()
            if not known(file, tests):
                return "there is no such test file"
            if function and not known(function, re.findall(r"\bfn (\w+)", tests[file].read_text())):
                return "there is no such test in that file"
        elif re.fullmatch(r"(\.ci/run)( \w+)+", token):
            count += 1
            absent = [s for s in token.split()[1:] if s not in steps]
            return f"there is no step {absent[0]}" if absent else None
        elif re.fullmatch(r"[a-z]+\d*(_[a-z\d]+){3,}_?\*?", token) and not token.startswith(OTHERS):
            count += 1
            return None if known(token, functions) else "there is no such test"
        return None

    for page in [ROOT / n for n in ("README.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").rglob("*.md")):
        others = ABOUT_OTHERS.get(str(page.relative_to(ROOT)), ())
        for number, line in enumerate(page.read_text().splitlines(), 1):
            for token in re.findall(r"`([^`]+)`", line):
                if not token.startswith(others) and (why := missing(token)):
                    bad.append(f"{page.relative_to(ROOT)}:{number}: `{token}`: {why}")
    print("\n".join(bad) or f"{count} names of files, tests and steps are right")
    return bool(bad)


class Page(HTMLParser):
    """What a page of the built book links to, and what can be linked to in it."""

    def __init__(self, file: Path):
        super().__init__()
        self.targets: list[str] = []
        self.ids: set[str] = set()
        self.feed(file.read_text())

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.add(value)
            elif name in ("href", "src") and value and not re.match(r"[a-z][a-z0-9+.-]*:", value):
                self.targets.append(value)


def html(folder: str) -> int:
    root = Path(folder).resolve()
    # Not the page of a missing page: its links are absolute, for it can be shown anywhere.
    pages = {f: Page(f) for f in root.rglob("*.html") if f.name not in ("404.html", "toc.html", "print.html")}
    bad, count = [], 0
    for file, page in sorted(pages.items()):
        for target in page.targets:
            count += 1
            path, _, anchor = unquote(target).partition("#")
            to = (file.parent / path).resolve() if path else file
            if not to.exists():
                bad.append(f"{file.relative_to(root)}: there is no {target}")
            elif anchor and to in pages and anchor not in pages[to].ids:
                bad.append(f"{file.relative_to(root)}: nothing in {to.relative_to(root)} is called #{anchor}")
    print("\n".join(bad) or f"{count} links in {len(pages)} built pages lead somewhere")
    return bool(bad)


def code(language: str, file: str) -> int:
    path = Path(file)
    text = path.read_text()
    found = 0
    for match in re.finditer(rf"^```{re.escape(language)}\n(.*?)^```\s*$", text, re.S | re.M):
        found += 1
        line = text.count("\n", 0, match.start(1)) + 1
        print(f'#line {line} "{path.name}"')  # so that a compiler names the chapter's line
        print(match.group(1), end="")
    if not found:
        print(f"{file} has no block of {language}", file=sys.stderr)
    return found == 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["links"]:
            sys.exit(links())
        case ["names"]:
            sys.exit(names())
        case ["html", folder]:
            sys.exit(html(folder))
        case ["code", language, file]:
            sys.exit(code(language, file))
    sys.exit(__doc__)
