"""A peer of a few lines: repeats the last tokens of the opening. Options of its press make it misbehave."""

from __future__ import annotations

import json
import os
import sys

for line in sys.stdin:
    request = json.loads(line)
    if "hello" in request:
        errors = {press: "unknown press" for press in request["hello"] if press.startswith("Nothing")}
        print(json.dumps({"peer": "fake 1.0", "software": "fake", "errors": errors}), flush=True)
        continue
    press, length = request["press"], len(request["opening"])
    if "dies" in press and (request["sample"] == "s1" or "always" in press):
        os._exit(3)
    keep = length if request["keep"] is None else request["keep"]
    said = [{"tokens": request["opening"][-question["most"] :]} for question in request["questions"]]
    reply = {
        "id": request["id"],
        "peer": "fake 1.0",
        "answers": said,
        "kept_share": keep / length,
        "kv_bytes": 64 * keep,
        "full_kv_bytes": 64 * length,
    }
    if "Ada" in press:
        reply |= {"kept_share": 1.0, "kv_bytes": 64 * length, "pretended_share": keep / length}
    if "garbled" in press:
        reply["id"] = "another"
    if "refuses" in press:
        reply = {"id": request["id"], "peer": "fake 1.0", "error": "AssertionError: window too long"}
    if "half" in press:
        said[0] = {"error": "ValueError: no hyperplane"}
    print(json.dumps(reply), flush=True)
