# Runs a generated program and its check, and says so on descriptor 3 only once the check has returned: exit codes prove nothing.


def _main():
    import ast
    import json
    import os
    import sys

    with open("job.json", encoding="utf-8") as f:
        job = json.load(f)
    os.unlink("job.json")
    token = job["token"].encode()
    write, leave, kind, modules = os.write, os._exit, type, sys.modules
    plain = (int, float, complex, bool, str, bytes, type(None), range)
    library = getattr(sys, "stdlib_module_names", frozenset())
    # Descriptors of `type` itself: a metaclass of the program's cannot answer in their place.
    flags, ancestors = type.__dict__["__flags__"].__get__, type.__dict__["__mro__"].__get__
    HEAP = 1 << 9

    def honest(value, depth=0):
        """Whether comparing `value` cannot be rigged: it holds nothing of a class of the program's own with an == of its own."""
        t = kind(value)
        if t in plain or depth > 50:
            return True
        if t is dict:
            return all(honest(k, depth + 1) and honest(v, depth + 1) for k, v in value.items())
        if t in (list, tuple, set, frozenset):
            return all(honest(v, depth + 1) for v in value)
        if not flags(t) & HEAP:
            return True
        home = t.__module__
        if home in library and getattr(modules.get(home), t.__name__, None) is t:
            return True
        return not any("__eq__" in c.__dict__ for c in ancestors(t)[:-1])

    class Rigged(Exception):
        pass

    def guarded(function):
        def call(*args, **kwargs):
            value = function(*args, **kwargs)
            if not honest(value):
                raise Rigged("the answer's class defines its own ==")
            return value

        return call

    scope = {"__name__": "__program__"}
    exec(compile(job["candidate"], "<program>", "exec"), scope)
    check = ast.parse(job["check"], "<check>")
    test_scope = dict(scope)
    last = check.body[-1].value if check.body and isinstance(check.body[-1], ast.Expr) else None
    if isinstance(last, ast.Call) and len(last.args) == 1 and isinstance(last.args[0], ast.Name):
        name = last.args[0].id
        test_scope[name] = guarded(scope[name])
    exec(compile(check, "<check>", "exec"), test_scope)
    write(3, token)
    leave(0)


_main()
