"""Checks of what is to be released.

    release.py package DIR      what `cargo package` made: licences, documents and headers are in it, nothing large
                                or of one machine
    release.py rust_version     no dependency of a user's build declares a later Rust than this crate does
    release.py docs_rs          prints the features that docs.rs builds with: all but what is not for documentation
"""
import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Bytes of one file, and of all: what is in it by mistake is larger, as a rule.
LARGEST, WHOLE = 200_000, 4_000_000


def package(folder: str) -> list[str]:
    root = Path(folder)
    files = [f for f in root.rglob("*") if f.is_file() and "target" not in f.relative_to(root).parts[:1]]
    names = {str(f.relative_to(root)) for f in files}
    wanted = ["LICENSE-MIT", "LICENSE-APACHE", "README.md", "CHANGELOG.md", "include/pinpool.h", "include/pinpool.hpp",
              "docs/design.md", "src/lib.rs"]
    bad = [f"{name} is missing" for name in wanted if name not in names]
    sizes = {f: f.stat().st_size for f in files}
    bad += [f"{f.relative_to(root)} has {n} bytes" for f, n in sizes.items() if n > LARGEST]
    total = sum(sizes.values())
    if total > WHOLE:
        bad.append(f"{total} bytes in all, {WHOLE} at most")
    manifest = tomllib.loads((root / "Cargo.toml").read_text())["package"]
    for field in ("description", "license", "readme", "keywords", "categories", "rust-version", "documentation"):
        if not manifest.get(field):
            bad.append(f"Cargo.toml has no {field}")
    print(f"{manifest['name']} {manifest['version']}: {len(files)} files, {total:,} bytes")
    return bad


def rust_version() -> list[str]:
    out = subprocess.run(["cargo", "metadata", "--format-version", "1", "--features", "full,rdma-mummy-sys", "--locked",
                          "--filter-platform", "x86_64-unknown-linux-gnu"],
                         cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    data = json.loads(out)
    packages = {p["id"]: p for p in data["packages"]}
    nodes = {n["id"]: n for n in data["resolve"]["nodes"]}
    root = data["resolve"]["root"]
    number = lambda text: tuple(int(part) for part in (text + ".0.0").split(".")[:3])
    most = number(packages[root]["rust_version"])
    seen, todo = set(), [root]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        for dep in nodes[node]["deps"]:
            if any(kind["kind"] != "dev" for kind in dep["dep_kinds"]):
                todo.append(dep["pkg"])
    late = [packages[i] for i in seen if packages[i]["rust_version"] and number(packages[i]["rust_version"]) > most]
    silent = sum(packages[i]["rust_version"] is None for i in seen)
    print(f"{len(seen) - 1} dependencies, {silent} of them without a declared minimum")
    return [f"{p['name']} {p['version']} needs Rust {p['rust_version']}" for p in late]


# Sets of others, the program, what it compares with, what a nightly compiler decides, and the binding that
# needs libibverbs to build.
UNDOCUMENTED = {"default", "full", "cli", "rivals", "nightly", "rdma-sys"}


def docs_rs() -> list[str]:
    manifest = tomllib.loads((ROOT / "Cargo.toml").read_text())
    listed = manifest["package"]["metadata"]["docs"]["rs"]["features"]
    print(",".join(listed))
    return [f"package.metadata.docs.rs lacks the feature {name}"
            for name in sorted(set(manifest["features"]) - set(listed) - UNDOCUMENTED)]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["package", folder]:
            problems = package(folder)
        case ["rust_version"]:
            problems = rust_version()
        case ["docs_rs"]:
            problems = docs_rs()
        case _:
            sys.exit(__doc__)
    sys.exit("\n".join(problems) or 0)
