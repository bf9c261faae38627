"""Checks of texts, not of behaviour: sizes, lines of at most 120 characters, where main() ends, unused imports."""
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"dpo.py": 45_000, "kto.py": 46_500, "rloo.py": 55_500, "refcache.py": 43_000, "tests/*.py": 220_000,
         "benchmarks/*.py": 80_000, "changes/*.patch": 45_000}
MAIN_ENDS = {"dpo.py": 370, "kto.py": 370, "rloo.py": 420}  # lines: the algorithm comes first, the plumbing last


def unused_imports(tree: ast.Module, lines: list[str]) -> set[str]:
    nodes = list(ast.walk(tree))
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    aliases = [alias for node in imports if "noqa: F401" not in lines[node.end_lineno - 1] for alias in node.names]
    names = {(alias.asname or alias.name).split(".")[0] for alias in aliases}
    return names - {node.id for node in nodes if isinstance(node, ast.Name)}


faults = []
for pattern, limit in SIZES.items():
    size = sum(len(file.read_text()) for file in ROOT.glob(pattern))
    print(f"{pattern:16} {size:7,} of {limit:7,} characters")
    if size > limit:
        faults.append(f"{pattern}: {size - limit} characters too many")
for file in [file for folder in (".", "tests", "benchmarks", ".ci", "demo") for file in ROOT.glob(f"{folder}/*.py")]:
    name = str(file.relative_to(ROOT))
    text = file.read_text()
    lines = text.splitlines()
    tree = ast.parse(text)
    faults += [f"{name}:{n}: {len(line)} characters" for n, line in enumerate(lines, 1) if len(line) > 120]
    faults += [f"{name}: {alias} is imported and not used" for alias in sorted(unused_imports(tree, lines))]
    if name in MAIN_ENDS:
        (end,) = [node.end_lineno for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
        if end > MAIN_ENDS[name]:
            faults.append(f"{name}: main() ends in line {end}, after line {MAIN_ENDS[name]}")
sys.exit("\n".join(faults) or 0)
