"""Draws the rooms of each package: what stands higher may import what stands lower.

    rooms_picture.py docs/img

A test holds the drawings against the folders and the imports that there are.
"""

import sys
from pathlib import Path

WIDTH, ROW, GAP, TOP = 820, 34, 8, 46
# By package; from the top of its house to the ground: bands, each of wings side by side, each of rows of rooms.
Band = dict[str, list[list[str]]]
HOUSES: dict[str, list[Band]] = {
    "crosstie": [
        {"": [["cli"], ["web"]]},
        {
            "prove": [
                ["prove.claims", "prove.review", "prove.loop"],
                ["prove.bench", "prove.parity"],
                ["prove.replay", "prove.calibration"],
                ["prove.probe"],
            ],
        },
        {
            "decide": [
                ["decide.scorecard", "decide.schedule"],
                ["decide.plan"],
                ["decide.cost"],
                ["decide.compare"],
            ],
        },
        {"port": [["port.recipe"], ["port.doctor"], ["port.preflight"], ["port.checkpoint"]]},
        {"foundations": [["sim"], ["route"], ["host"], ["perf", "catalog", "wire"], ["core"]]},
    ],
    "crosstie_gateway": [
        {"": [["cli"], ["demo"]]},
        {
            "": [
                ["pick", "scale"],
                ["scaler", "start"],
                ["hosting"],
                ["service"],
                ["batch", "cluster"],
                ["gateway", "emulate"],
            ]
        },
        {"": [["ledger", "share"], ["wire"]]},
    ],
    "crosstie_port": [
        {"": [["cli"], ["porting"], ["source", "capture", "divergence", "checkpoint", "profile"], ["kernels"]]},
    ],
}
COLOURS = {
    "": "#e8ebee",
    "decide": "#dcebf7",
    "port": "#f9e7d2",
    "prove": "#eee2f4",
}
GROUNDS = {
    "crosstie": "imports go down: a room uses those below it, never those above",
    "crosstie_gateway": "crosstie-gateway: imports go down, and below this house all of crosstie",
    "crosstie_port": "crosstie-port: imports go down, and below this house all of crosstie",
}
TITLES = {
    "prove": "prove: measure, replay, calibrate",
    "decide": "decide: which, how many, at what cost",
    "port": "port: what runs where, and how it is started",
    "foundations": "foundations: nouns, performance model, data, policies",
}


def file_name(package: str) -> str:
    """`rooms.svg` of `crosstie`, `rooms-port.svg` of `crosstie_port`."""
    return f"rooms{package.removeprefix('crosstie').replace('_', '-')}.svg"


def boxes(package: str) -> dict[str, tuple[float, float, float]]:
    """Left edge, top and width of each room."""
    found = {}
    y = float(TOP)
    for band in HOUSES[package]:
        across = (WIDTH - GAP * (len(band) + 1)) / len(band)
        titled = 20 if any(band) else 0
        rows = max(map(len, band.values()))
        for column, wing in enumerate(band.values()):
            left = GAP + column * (across + GAP)
            for number, row in enumerate(wing):
                wide = (across - GAP * (len(row) + 1)) / len(row)
                for place, room in enumerate(row):
                    top = y + titled + GAP + number * (ROW + GAP)
                    found[room] = (left + GAP + place * (wide + GAP), top, wide)
        y += titled + GAP + rows * (ROW + GAP) + GAP
    return found


def svg(package: str) -> str:
    rooms = boxes(package)
    height = max(top for _, top, _ in rooms.values()) + ROW + 3 * GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height:.0f}" rx="6" fill="#fff"/>',
        f'<text x="{WIDTH / 2:.0f}" y="28" font-size="14" fill="#556" text-anchor="middle">{GROUNDS[package]}</text>',
    ]
    for band in HOUSES[package]:
        across = (WIDTH - GAP * (len(band) + 1)) / len(band)
        for column, (name, wing) in enumerate(band.items()):
            left, top = GAP + column * (across + GAP), min(rooms[room][1] for row in wing for room in row)
            titled = 20 if name else 0
            tall = titled + GAP + max(map(len, band.values())) * (ROW + GAP)
            colour = COLOURS.get(name, "#f1eee8")
            parts.append(
                f'<rect x="{left:.0f}" y="{top - titled - GAP:.0f}" width="{across:.0f}" height="{tall:.0f}" rx="6" '
                f'fill="{colour}"/>'
            )
            if name:
                parts.append(
                    f'<text x="{left + GAP:.0f}" y="{top - 9:.0f}" font-size="12" fill="#445">{TITLES[name]}</text>'
                )
    for room, (left, top, wide) in rooms.items():
        shown = room.rpartition(".")[2]
        parts.append(
            f'<g><title>{room}</title><rect x="{left:.0f}" y="{top:.0f}" width="{wide:.0f}" height="{ROW}" rx="4" '
            f'fill="#fff" stroke="#8895a3"/><text x="{left + wide / 2:.0f}" y="{top + 22:.0f}" font-size="14" '
            f'fill="#1b2733" text-anchor="middle">{shown}</text></g>'
        )
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    for house in HOUSES:
        Path(sys.argv[1], file_name(house)).write_text(svg(house), encoding="utf-8")
