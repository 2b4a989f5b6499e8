"""Checks that each file under src names only modules of its own layer or lower ones.

The layers are those of docs/design.md. `config` may name `pool` for one thing, its return type.
"""
import re
import sys
from pathlib import Path

LAYERS = [
    {"access", "error", "lock", "problem", "damage", "outstanding", "reentry", "sync", "size_class", "config", "reach", "bell", "contained"},
    {"sys"},
    {"device", "preflight"},
    {"arena", "ordered", "page_map", "published", "slab"},
    {"stack", "gate", "drought", "guard", "depot", "magazine", "thread", "stats", "record", "tokens", "mark", "outs", "waiters"},
    {"pool", "buf", "local", "batch", "shared", "sg_list"},
    {"adapters", "doctor", "lease", "loopback"},
]
# (file's module, module it may name although that is higher): why.
ALLOWED = {
    ("config", "sys"): "reads limits while it plans",
    ("config", "device"): "a builder holds a device",
    ("config", "pool"): "build() returns one",
    ("config", "preflight"): "has its plan judged",
    ("sync", "sys"): "the heavy half of the barrier is a system call",
    ("thread", "pool"): "a thread's list gives back to cores",
    ("arena", "config"): "builds from a plan",
}


def main() -> int:
    level = {name: i for i, names in enumerate(LAYERS) for name in names}
    src = Path(__file__).resolve().parent.parent / "src"
    bad = []
    for path in sorted(src.rglob("*.rs")):
        parts = path.relative_to(src).with_suffix("").parts
        if parts[0] in ("lib", "bin", "book"):
            continue
        if parts[0] not in level:
            bad.append(f"{path}: in no layer; add it to .ci/layers.py and docs/design.md")
            continue
        code = re.sub(r"//.*", "", path.read_text())
        code = code.split("#[cfg(test)]")[0]
        named = set(re.findall(r"crate::(\w+)", code))
        for group in re.findall(r"use crate::\{(.*?)\};", code, re.S):
            # Only the outer names: what stands in inner braces belongs to the name before them.
            depth, flat = 0, ""
            for c in group:
                depth += (c == "{") - (c == "}")
                flat += c if depth == 0 else ""
            named |= {n.strip().split("::")[0] for n in flat.split(",") if n.strip()}
        for name in sorted(named):
            if level.get(name, 0) > level[parts[0]] and (parts[0], name) not in ALLOWED:
                bad.append(f"{path.relative_to(src)} (layer {level[parts[0]]}) names {name} (layer {level[name]})")
    print("\n".join(bad) or "every file uses only its own layer or lower ones")
    return bool(bad)


sys.exit(main())
