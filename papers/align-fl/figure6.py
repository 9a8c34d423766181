"""Figure 6 of ALIGN-FL: the epsilon of theorem A.5 against the radius of the data, and whether it says anything.

    python papers/align-fl/figure6.py [figure6.svg]

The paper gives no numbers for its figure. Here: its own setting (two latents, ten rounds, 5,000 samples of each of five
decoders a round, delta 1e-5), for several Lipschitz constants. A line is dashed where the bound is vacuous.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from fedloom.privacy.lipschitz import AlignBound, align_bound, latent_radius

ROUNDS, RELEASED, LATENT, DELTA = 10, 25_000, 2, 1e-5
CONSTANTS = (1e-12, 1e-6, 1e-3, 1.0)
RADII = tuple(10 ** (-2 + 3.5 * step / 70) for step in range(71))  # 0.01 to 31.6; MNIST's is 28
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 420, 70, 50, 20, 120
COLOURS = ("#0b6e99", "#2a9d5c", "#c77d0a", "#b3362b")
LOWEST, HIGHEST = -2, 8  # powers of ten of epsilon


def bound(constant: float, radius: float) -> AlignBound:
    """The theorem in the paper's setting."""
    return align_bound(constant, radius, latent_radius(LATENT, DELTA), ROUNDS, RELEASED)


def across(radius: float) -> float:
    """Where a radius lies on the picture."""
    share = (math.log10(radius) - math.log10(RADII[0])) / (math.log10(RADII[-1]) - math.log10(RADII[0]))
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def up(epsilon: float) -> float:
    """Where an epsilon lies on the picture."""
    share = (math.log10(epsilon) - LOWEST) / (HIGHEST - LOWEST)
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def curve(constant: float, colour: str) -> str:
    """One constant's line, in two parts."""
    known = [(radius, bound(constant, radius)) for radius in RADII]
    parts = []
    for vacuous, style in ((False, ""), (True, ' stroke-dasharray="6 4"')):
        points = [(across(r), up(b.epsilon)) for r, b in known if b.vacuous == vacuous]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{style}/>')
    end = up(known[-1][1].epsilon)
    label = f'<text x="{WIDTH - RIGHT + 6}" y="{end + 4:.1f}" fill="{colour}">L = {constant:g}</text>'
    return "".join(parts) + label


def picture() -> str:
    """The whole figure as SVG."""
    rules = []
    for power in range(LOWEST, HIGHEST + 1, 2):
        y = up(10**power)
        rules.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        rules.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    for radius in (0.01, 0.1, 1, 10, 28):
        x = across(radius)
        rules.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        rules.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{radius:g}</text>')
    rules.append(f'<path d="M{LEFT} {up(10):.1f}H{WIDTH - RIGHT}" stroke="#555"/>')
    rules.append(f'<text x="{LEFT + 6}" y="{up(10) - 5:.1f}">epsilon 10</text>')
    rules.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">data radius</text>')
    rules.append(f'<text x="14" y="{TOP + 10}">epsilon</text>')
    curves = "".join(curve(constant, colour) for constant, colour in zip(CONSTANTS, COLOURS, strict=True))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
    return (
        f'{head} font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{"".join(rules)}{curves}</svg>\n'
    )


def main(out: Path) -> None:
    """Write the figure, and say what it shows."""
    out.write_text(picture(), encoding="utf-8")
    print("L        epsilon at radius 28   alpha")
    for constant in CONSTANTS:
        found = bound(constant, 28.0)
        print(f"{constant:<8g} {found.epsilon:<22.3g} {found.alpha:.3g}")
    print(f"L = 1: {bound(1.0, 28.0).sentence}")
    steps, target = 2 * ROUNDS * RELEASED, 10.0
    largest = (target / steps) ** 2 / (2 * latent_radius(LATENT, DELTA) * 28.0)
    print(f"epsilon {target:g} at radius 28 needs L <= {largest:.2g}: an image that hardly depends on its latents")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("figure6.svg"))
