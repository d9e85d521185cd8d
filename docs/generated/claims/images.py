"""Claims tried by descriptions of pictures, from a cache that is evicted from or merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from generated.claims.form import Claim, Tried, of_all, verdict
from generated.results import read

#: What the paper judges descriptions by, as the rows call it where a difference is positive for the better.
MEASURES = ("nats", "rouge")


def _shown(found: Mapping[str, float], digits: int = 2) -> str:
    return f"{found['mean']:+.{digits}f} ({found['low']:+.{digits}f} to {found['high']:+.{digits}f})"


def beside(other: str) -> Callable[[], Tried]:
    """`elastic` beside another method with as many entries, at each budget."""

    def tried() -> Tried:
        data = read("image-grids")
        rows = {(row["method"], row["budget"]): row for row in data["rows"]}
        pairs = [one for one in data["differences"] if one["better"] == "elastic" and one["than"] == other]
        each = []
        for one in pairs:
            own, its = (rows[name, one["budget"]]["perplexity"]["mean"] for name in ("elastic", other))
            each.append(f"{one['budget']}: {own:.1f} and {its:.1f}, ROUGE-L {_shown(one['rouge'])}")
        held = [rows["elastic", budget]["bytes"] for budget in dict.fromkeys(one["budget"] for one in pairs)]
        full = rows["full", ""]
        return Tried(
            f"perplexity (full cache {full['perplexity']['mean']:.1f}) beside `{other}`, and by how much ROUGE-L (full "
            f"cache {full['rouge']['mean']:.2f}) is higher: {'; '.join(each)}",
            ", ".join(f"{share:.0%}" for share in held),
            f"LLaVA of {data['model']['parameters'] / 1e6:.1f}M trained here, {data['grids']} pictures of nine shapes",
            "image-grids.json",
            "benchmarks/quality/image_grids.py",
            of_all([verdict(one[name]["low"], one[name]["high"], 0.0) for one in pairs for name in MEASURES]),
        )

    return tried


CLAIMS = (
    Claim("Elastic Cache", "describes pictures better than H2O evicting, at 20 to 80 %", beside("h2o")),
    Claim("Elastic Cache", "describes pictures better than StreamingLLM, at 20 to 80 %", beside("streaming")),
    Claim(
        "Elastic Cache",
        "entries merged into anchors keep more of a picture than the same entries dropped",
        beside("elastic:merge=none"),
    ),
)
