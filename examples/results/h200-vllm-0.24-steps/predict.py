"""What the model says of the points before they are measured."""
import json, subprocess, sys
M = "/work/main/.gpu/c/models/"
def run(*a):
    r = subprocess.run(["crosstie", *a], capture_output=True, text=True)
    if r.returncode not in (0, 1): print(a, r.stderr[-300:])
    return r
out = {"what": "made before anything was measured", "commit": subprocess.run(["git", "-C", "/work/main", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(), "closed": {}, "open": {}}
for model, precision, points, more in (
    ("qwen3-14b", "bf16", ((2048,128,4),(2048,128,32),(300,300,96),(32000,64,1),(300,300,1)), ()),
    ("qwen3-30b-a3b", "bf16", ((1024,256,1),(1024,256,8),(1024,256,32),(1024,256,128)), ()),
    ("qwen3-8b", "fp8", ((1024,256,1),(1024,256,8),(1024,256,32)), ("--speculation", "ngram:3")),
):
    for i, o, c in points:
        r = run("compare", M + model, "--precision", precision, "--on", "h200", "--input", str(i), "--output", str(o), "--concurrency", str(c), "--json", *more)
        try: out["closed"][f"{model} {precision} {i}/{o} x {c} {' '.join(more)}".strip()] = json.loads(r.stdout)
        except Exception as e: print(r.stderr[-400:])
json.dump(out, open("predicted-raw.json", "w"), indent=1)
