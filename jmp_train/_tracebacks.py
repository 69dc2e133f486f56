"""What the Python traceback of an operation says that the jaxpr does not.

Decides, from the frames between the user's code and JAX, whether a cast was asked for by name and whether an operation
is part of a user-written derivative rule that differentiation has already expanded. This is best effort: the names of
JAX's own frames may change, so that only reports to people use it, and no pass does.
"""

from collections.abc import Iterator

from ._jaxpr import JAX_FOLDER, Node, open_jaxpr

# JAX's frames around a call from outside, and the calls that ask for a dtype by name.
_WRAPPERS = (".meth", ".op", ".cache_miss", ".reraise_with_filtered_traceback")
_CASTS = frozenset({"_astype", "astype", "array", "asarray", "convert_element_type", "_ScalarMeta.__call__"})
# JAX calls these around the functions given to `defjvp` and `defvjp`.
_RULE_CALLS = {
    "_flatten_jvp": "custom_jvp",
    "_flatten_fwd": "custom_vjp",
    "_flatten_bwd": "custom_vjp",
}


def frames_of(node: Node) -> Iterator[tuple[str, str, int]]:
    """(function, file, line), innermost first, those of the calls around it included."""
    for eqn in (node.eqn, *node.calls):
        traceback = eqn.source_info.traceback
        for frame in traceback.frames if traceback else ():
            yield frame.function_name, frame.file_name, frame.line_num


def is_jax(file: str) -> bool:
    return file.startswith(JAX_FOLDER)


def is_asked_for(node: Node) -> bool:
    """Whether code outside JAX asked for this cast: `x.astype`, `jnp.asarray`, `jnp.float32(x)` and the like."""
    entry = ""
    for function, file, _ in frames_of(node):
        if not is_jax(file):
            return entry in _CASTS
        if not function.endswith(_WRAPPERS):
            entry = function
    return False


def user_rules(node: Node) -> Iterator[str]:
    """The user-written derivative rules that this node stands for, or was made by."""
    if node.name in ("custom_jvp_call", "custom_vjp_call"):
        origin = getattr(open_jaxpr(node.params["call_jaxpr"]).debug_info, "func_src_info", None) or "<unknown>"
        name, _, where = origin.partition(" at ")
        if not is_jax(where):
            # JAX knows no line of a callable that is no Python function, such as a `functools.partial`.
            yield f"{node.name.removesuffix('_call')} of {name}" + (f" ({where})" if where else "")
    elif node.name == "linear_call":
        yield "linear_call"
    yield from _expanded(node)


def _expanded(node: Node) -> Iterator[str]:
    rule = None
    for function, file, line in frames_of(node):
        kind = _RULE_CALLS.get(function)
        if kind is not None and rule is not None and not is_jax(rule[1]):
            yield f"{kind} rule {rule[0]} ({rule[1]}:{rule[2]}), expanded"
        if "custom_derivatives" not in file:
            rule = (function, file, line)
