"""Where a chat template looks that no trial conversation need show: by its syntax tree.

Frames are texts around messages, found by rendering conversations. A template may look at a message
by its length, its characters or its place, and no finite number of trials shows all of that. So
only templates whose every step with messages is known here to be shown by trials get frames.
"""

from collections.abc import Iterator

from jinja2 import nodes

from ssdevice.text.frames import Doubt

SMALL = 2
"""The trials have conversations of one to five messages, and each text of the template as content:
numbers up to this one make no difference that they do not show.
"""
METHODS = frozenset(
    (
        "strip",
        "lstrip",
        "rstrip",
        "startswith",
        "endswith",
        "split",
        "rsplit",
        "replace",
        "removeprefix",
        "removesuffix",
        "items",
        "get",
        "keys",
        "values",
        "append",
        "join",
    )
)
"""Of contents and messages. What they look for is a text of the template."""
FILTERS = frozenset(
    (
        "trim",
        "string",
        "list",
        "first",
        "last",
        "length",
        "count",
        "default",
        "d",
        "safe",
        "join",
        "reverse",
        "tojson",
        "map",
        "select",
        "reject",
        "selectattr",
        "rejectattr",
        "items",
        "replace",
    )
)
TESTS = frozenset(
    (
        "defined",
        "undefined",
        "none",
        "string",
        "mapping",
        "iterable",
        "sequence",
        "true",
        "false",
        "boolean",
        "equalto",
        "eq",
        "==",
        "ne",
        "!=",
        "in",
        "sameas",
        "odd",
        "even",
        "number",
        "integer",
    )
)
ORDERED = frozenset({"lt", "lteq", "gt", "gteq"})
"""Comparisons that say more of two texts than whether they are equal."""
SHUFFLED = "random"
GIVEN = ("messages",)
LOOP = "loop"
ROLE = "role"
WORKED = (nodes.Mul, nodes.Pow, nodes.Div, nodes.FloorDiv)
"""Arithmetic that makes large numbers of small ones."""


def doubts(tree: nodes.Template) -> Iterator[Doubt]:
    """The doubtful steps of a template."""
    spoken = _spoken(tree)
    large = _large(tree, spoken)
    for expression in _expressions(tree):
        if not _names(expression) & spoken:
            continue
        for node in _nodes(expression):
            reason = _doubt(node, spoken, large)
            if reason is not None:
                yield Doubt(f"{reason} (line {node.lineno})", _only_places(expression))
    blocks: list[nodes.FilterBlock | nodes.AssignBlock] = [*tree.find_all(nodes.FilterBlock)]
    blocks += tree.find_all(nodes.AssignBlock)
    for block in blocks:
        if block.filter is None or not _names(block) & spoken:
            continue
        for node in _nodes(block.filter):
            if _is_large(node) or (isinstance(node, nodes.Filter) and node.name not in FILTERS):
                yield Doubt(f"a filter around a block (line {block.lineno})", False)


def _only_places(expression: nodes.Node) -> bool:
    """Whether an expression reads no message: the list of them, and the place of a loop."""
    reads = [
        node
        for node in _nodes(expression)
        if isinstance(node, nodes.Getattr) and _names(node.node) != {LOOP}
    ]
    keys = [
        node
        for node in _nodes(expression)
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice)
    ]
    return not reads and not keys and _names(expression) <= {*GIVEN, LOOP}


def _nodes(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    yield from node.find_all(nodes.Node)


def _names(node: nodes.Node) -> set[str]:
    """The variables in an expression; ``ns.x`` counts as ``ns``.

    ``message.role`` does not count: a role is one of four words, and trials have them all.
    """
    if _is_role(node):
        return set()
    if isinstance(node, (nodes.Name, nodes.NSRef)):
        return {node.name}
    found = set[str]()
    for child in node.iter_child_nodes():
        found |= _names(child)
    return found


def _is_role(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == ROLE and isinstance(node.node, nodes.Name)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value == ROLE and isinstance(node.node, nodes.Name)
    return False


def _expressions(tree: nodes.Template) -> Iterator[nodes.Expr]:
    """The outermost expressions, each alone."""
    pending: list[nodes.Node] = [tree]
    while pending:
        node = pending.pop()
        for child in node.iter_child_nodes():
            if isinstance(child, nodes.Expr):
                yield child
            else:
                pending.append(child)


def _spoken(tree: nodes.Template) -> set[str]:
    """The variables that messages, parts of them or their places reach, directly or by others."""
    found = {*GIVEN, LOOP}
    for macro in tree.find_all(nodes.Macro):
        found |= {argument.name for argument in macro.args} | {macro.name}
    before = 0
    while len(found) > before:
        before = len(found)
        for targets, source in _assignments(tree):
            if _names(source) & found:
                found |= targets
    return found


def _assignments(tree: nodes.Template) -> Iterator[tuple[set[str], nodes.Node]]:
    """Variables, and what they are set to: an expression, or the text of a block."""
    for each in tree.find_all(nodes.Assign):
        yield _names(each.target), each.node
    for block in tree.find_all(nodes.AssignBlock):
        yield _names(block.target), block
    for loop in tree.find_all(nodes.For):
        yield _names(loop.target), loop.iter
    for scope in tree.find_all(nodes.With):
        for target, value in zip(scope.targets, scope.values, strict=True):
            yield _names(target), value


def _large(tree: nodes.Template, spoken: set[str]) -> set[str]:
    """The variables that are set to a number beyond SMALL without messages, which is seen there."""
    found = set[str]()
    before = -1
    while len(found) > before:
        before = len(found)
        for targets, source in _assignments(tree):
            if _names(source) & spoken:
                continue
            if _names(source) & found or any(map(_is_large, _nodes(source))):
                found |= targets
    return found


def _is_large(node: nodes.Node) -> bool:
    if isinstance(node, WORKED):
        return True
    return _number(node) and abs(node.value) > SMALL  # type: ignore[attr-defined]


def _number(node: nodes.Node) -> bool:
    return (
        isinstance(node, nodes.Const)
        and isinstance(node.value, (int, float))
        and not isinstance(node.value, bool)
    )


def _doubt(node: nodes.Node, spoken: set[str], large: set[str]) -> str | None:
    """What a node of an expression with messages may do that trials do not show; None: nothing."""
    if _is_large(node):
        return "a number beside messages"
    if isinstance(node, nodes.Name) and node.name in large:
        return f"{node.name!r}, a number beside messages"
    if isinstance(node, (nodes.Filter, nodes.Test)):
        return _named_doubt(node, spoken)
    if isinstance(node, nodes.Getitem):
        return _place_doubt(node, spoken)
    if isinstance(node, nodes.Call):
        return _method_doubt(node, spoken)
    if isinstance(node, nodes.Compare):
        return _order_doubt(node)
    if isinstance(node, nodes.Mod) and not _number(node.right):
        return "a text formatted by %"
    return None


def _named_doubt(node: nodes.Filter | nodes.Test, spoken: set[str]) -> str | None:
    kind = "filter" if isinstance(node, nodes.Filter) else "test"
    known = FILTERS if isinstance(node, nodes.Filter) else TESTS
    if node.name == SHUFFLED:
        return f"the {kind} {node.name!r}"
    if node.node is None or not _names(node.node) & spoken or node.name in known:
        return None
    return f"the {kind} {node.name!r}"


def _place_doubt(node: nodes.Getitem, spoken: set[str]) -> str | None:
    """Places are constant, or beside the message of a loop."""
    if not _names(node.node) & spoken:
        return None
    place = node.arg
    if isinstance(place, nodes.Slice):
        bounds = [bound for bound in (place.start, place.stop, place.step) if bound is not None]
        if all(_constant(bound) for bound in bounds):
            return None
        return "a slice whose bounds are not constant"
    if _names(place) <= spoken or isinstance(place, nodes.Const):
        return None
    return "a place that is not constant"


def _constant(node: nodes.Node) -> bool:
    if isinstance(node, (nodes.Neg, nodes.Pos)):
        return _constant(node.node)
    return _number(node)


def _method_doubt(node: nodes.Call, spoken: set[str]) -> str | None:
    method = node.node
    if not isinstance(method, nodes.Getattr) or not _names(method.node) & spoken:
        return None
    if method.attr not in METHODS:
        return f"the method {method.attr!r}"
    separated = bool(node.args) and isinstance(node.args[0], nodes.Const)
    if method.attr in ("split", "rsplit") and not separated:
        return f"the method {method.attr!r}, which divides a text into words"
    return None


def _order_doubt(node: nodes.Compare) -> str | None:
    for operand in node.ops:
        texts = [each for each in (node.expr, operand.expr) if isinstance(each, nodes.Const)]
        texts = [each for each in texts if isinstance(each.value, str)]
        if operand.op in ORDERED and texts:
            return "texts compared by their order"
        inside = isinstance(operand.expr, nodes.Const) and isinstance(operand.expr.value, str)
        if operand.op in ("in", "notin") and inside:
            return "a search for a part of a message in a text"
    return None
