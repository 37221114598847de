"""Draws the rooms as docs/img/rooms.svg: what stands higher may import what stands lower.

    rooms_picture.py docs/img/rooms.svg

A test holds the drawing against the folders and the imports that there are.
"""

import sys
from pathlib import Path

WIDTH, ROW, GAP, TOP = 820, 34, 8, 46
# From the top of the house to its ground: bands, each of wings side by side, each of rows of rooms.
BANDS: list[dict[str, list[list[str]]]] = [
    {"": [["cli"], ["web"], ["demo"]]},
    {
        "prove": [
            ["prove.claims", "prove.review", "prove.loop"],
            ["prove.bench", "prove.parity", "prove.profile"],
            ["prove.replay", "prove.calibration"],
            ["prove.probe"],
        ],
    },
    {"operate": [["operate.scale"]]},
    {
        "decide": [
            ["decide.scorecard", "decide.schedule", "decide.scale"],
            ["decide.plan"],
            ["decide.cost"],
            ["decide.compare"],
        ],
        "run": [
            ["run.pick"],
            ["run.service"],
            ["run.batch", "run.cluster"],
            ["run.gateway", "run.emulate"],
            ["run.ledger", "run.share"],
            ["run.wire"],
        ],
    },
    {
        "port": [
            ["port.recipe"],
            ["port.doctor"],
            ["port.preflight", "port.divergence"],
            ["port.checkpoint", "port.capture"],
            ["port.kernels", "port.source"],
        ],
    },
    {"foundations": [["sim"], ["route"], ["host"], ["perf", "catalog", "wire"], ["core"]]},
]
COLOURS = {
    "": "#e8ebee",
    "decide": "#dcebf7",
    "port": "#f9e7d2",
    "run": "#dff1e0",
    "prove": "#eee2f4",
    "operate": "#f4f0d6",
}
TITLES = {
    "prove": "prove: replay, measure, calibrate",
    "decide": "decide: which, how many, at what cost",
    "port": "port: what breaks on ROCm",
    "operate": "operate: the fleet kept as it should be",
    "run": "run: one endpoint over the fleet",
    "foundations": "foundations: nouns, performance model, data, policies",
}


def boxes() -> dict[str, tuple[float, float, float]]:
    """Left edge, top and width of each room."""
    found = {}
    y = float(TOP)
    for band in BANDS:
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


def svg() -> str:
    rooms = boxes()
    height = max(top for _, top, _ in rooms.values()) + ROW + 3 * GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height:.0f}" rx="6" fill="#fff"/>',
        f'<text x="{WIDTH / 2:.0f}" y="28" font-size="14" fill="#556" text-anchor="middle">'
        "imports go down: a room uses those below it, never those above or beside it in another wing</text>",
    ]
    for band in BANDS:
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
    Path(sys.argv[1]).write_text(svg(), encoding="utf-8")
