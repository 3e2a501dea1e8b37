"""A local model hub: the part of its HTTP protocol that a download needs."""

from __future__ import annotations

import http.server
import json
from pathlib import Path

COMMIT = "c" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves ``folder`` as ``name``; org/gated and org/broken are errors. ``requested`` lists the files served."""

    name = "org/model"
    folder: Path
    requested: list[str]

    def log_message(self, *args):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.split("?")[0]
        paths = sorted(file for file in self.folder.rglob("*") if file.is_file())
        files = {file.relative_to(self.folder).as_posix(): file.read_bytes() for file in paths}
        if "org/gated" in path:
            self.answer(403, X_Error_Code="GatedRepo")
        elif "org/broken" in path:
            self.answer(500)
        elif self.name not in path:
            self.answer(404, X_Error_Code="RepoNotFound")
        elif "/revision/" in path and not path.endswith(("/main", COMMIT)):
            self.answer(404, X_Error_Code="RevisionNotFound")
        elif "/revision/" in path:
            info = {"id": self.name, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            self.answer(200, json.dumps(info).encode())
        elif "/tree/" in path:
            numbered = enumerate(files.items())
            tree = [{"type": "file", "path": n, "size": len(b), "oid": f"{i:040}"} for i, (n, b) in numbered]
            self.answer(200, json.dumps(tree).encode())
        else:
            name = path.split(f"/resolve/{COMMIT}/")[1]
            self.requested.append(name)
            self.answer(200, files[name], ETag=f'"{list(files).index(name):040}"')

    do_HEAD = do_GET
