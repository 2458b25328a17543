"""Reads structures, enumerations and vtables out of preprocessed C, for scripts/gen-abi.

It knows just the C that ggml's structures use and raises Refused for anything else.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

SCALARS = {
    "int": "c_int",
    "char": "c_char",
    "bool": "c_bool",
    "_Bool": "c_bool",
    "float": "c_float",
    "size_t": "c_size_t",
    "uint8_t": "c_uint8",
    "int32_t": "c_int32",
    "uint32_t": "c_uint32",
    "int64_t": "c_int64",
    "uint64_t": "c_uint64",
}


class Refused(Exception):
    """The headers hold something this generator does not know, or the layouts differ."""


@dataclass(frozen=True)
class Field:
    """One member: `ctype` names a ctypes type or an earlier structure; `prototype` is set for
    function pointers: the result's ctype (None for void) and the arguments'."""

    name: str
    ctype: str
    is_array: bool = False
    prototype: tuple[str | None, tuple[str, ...]] | None = None


class Declarations:
    """Structures, enumerations and pointer typedefs of preprocessed C.

    `structs` are the names that members may have by value.
    """

    def __init__(self, text: str, structs: Collection[str]) -> None:
        self.structs = structs
        self.text = re.sub(r"\s+", " ", text)
        self.pointers = set(
            re.findall(r"\btypedef (?:const )?(?:struct )?\w+ ?\* ?(\w+) ?;", self.text)
        )

    def struct(self, name: str) -> list[Field]:
        body = self._body("struct", name)
        return [self.field(f"{name}: {d}", d) for d in _declarations(body)]

    def enumerators(self, name: str) -> list[str]:
        entries = self._body("enum", name).split(",")
        return [e.split("=")[0].strip() for e in entries if e.strip()]

    def field(self, where: str, declaration: str) -> Field:
        function = re.fullmatch(r"(.+?)\( ?\* ?(\w+) ?\) ?\((.*)\)", declaration)
        if function:
            result, name, arguments = function.groups()
            prototype = (self._result(where, result), self._arguments(where, arguments))
            return Field(name, "c_void_p", prototype=prototype)
        member = re.fullmatch(r"(.+?[ *])(\w+) ?(\[.+\])?", declaration)
        if not member:
            raise Refused(f"cannot read the member {where}")
        ctype, name, length = member.groups()
        if length and length.count("[") > 1:
            raise Refused(f"cannot read an array of arrays, {where}")
        return Field(name, self.ctype(where, ctype), is_array=bool(length))

    def ctype(self, where: str, declared: str) -> str:
        """The ctypes name of a C type; every data pointer is a c_void_p."""
        words = [w for w in declared.replace("*", " * ").split() if w not in ("const", "volatile")]
        if "*" in words or (len(words) == 1 and words[0] in self.pointers):
            return "c_void_p"
        if words[0] == "enum" and len(words) == 2:
            return "c_int"
        if words[0] == "struct" and len(words) == 2:
            if words[1] in self.structs:
                return words[1]
        elif len(words) == 1 and words[0] in SCALARS:
            return SCALARS[words[0]]
        raise Refused(f"unknown type '{declared.strip()}' in {where}")

    def _result(self, where: str, declared: str) -> str | None:
        return None if declared.strip() == "void" else self.ctype(where, declared)

    def _arguments(self, where: str, declared: str) -> tuple[str, ...]:
        if declared.strip() in ("", "void"):
            return ()
        ctypes_ = []
        for argument in declared.split(","):
            if re.fullmatch(r" ?const char ?\* ?\w* ?", argument):
                ctypes_.append("c_char_p")  # arrives as bytes; only as a result would it leak
                continue
            match = re.fullmatch(r"(.+[ *])\w+ ?", argument)
            if not match:
                raise Refused(f"cannot read the argument '{argument.strip()}' of {where}")
            ctypes_.append(self.ctype(where, match[1]))
        return tuple(ctypes_)

    def _body(self, kind: str, name: str) -> str:
        match = re.search(rf"\b{kind} {name} ?{{([^{{}}]*)}}", self.text)
        if not match:
            raise Refused(f"the headers declare no plain {kind} {name}")
        return match[1]


def _declarations(body: str) -> list[str]:
    return [d.strip() for d in body.split(";") if d.strip()]
