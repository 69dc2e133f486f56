"""Lists the long files and functions of the package; length is a reason to read them again, not a failure."""

import ast
from pathlib import Path

LONG_FILE, LONG_FUNCTION = 300, 40


def lines_of(node):
    return set(range(node.lineno, node.end_lineno + 1))


def own_lines(function):
    """Lines of a function without its docstring and without the functions inside it, which count by themselves."""
    lines = lines_of(function)
    if ast.get_docstring(function) is not None:
        lines -= lines_of(function.body[0])
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef) and node is not function:
            lines -= lines_of(node)
    return lines


def summary(package: Path) -> list[str]:
    """One line for each long file and each long function."""
    found = []
    for path in sorted(package.rglob("*.py")):
        text, name = path.read_text(), str(path.relative_to(package))
        if len(text.splitlines()) > LONG_FILE:
            found.append(f"{name}: {len(text.splitlines())} lines")
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        lengths = {function.name: len(own_lines(function)) for function in functions}
        found += [f"{name}, {each}: {n} lines" for each, n in lengths.items() if n > LONG_FUNCTION]
    return found
