"""Cases of Einsum."""

import torch

from tests.op_case import OpCase, Spec

_SIZES = [
    dict(zip("bhijk", s, strict=True)) for s in ((2, 3, 4, 5, 6), (1, 1, 1, 1, 1), (3, 1, 7, 2, 1), (2, 3, 0, 5, 4))
]


def _case(equation: str, *dims: str) -> OpCase:
    return OpCase(
        "",
        "Einsum",
        tuple(map(Spec, dims)),
        lambda *xs: torch.einsum(equation, *xs),
        attributes={"equation": equation},
        sizes=_SIZES,
        label=equation,
    )


CASES = [
    _case("ij,jk->ik", "i j", "j k"),
    _case("bij,bjk->bki", "b i j", "b j k"),
    _case("bhid,bhjd->bhij", "b h i k", "b h j k"),
    _case("bij,bjk,k->bi", "b i j", "b j k", "k"),
    _case("ij,ij->", "i j", "i j"),
    _case("ij->ji", "i j"),
    _case("ij->i", "i j"),
    _case("ij,k->ik", "i j", "k"),
    _case("i,j->ij", "i", "j"),
    _case(",ij->ji", "", "i j"),
]
