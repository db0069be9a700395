"""A server of files on this machine, such as the Hugging Face hub is, with all the ways a download may go wrong."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import processes

FOLDER = "/datasets/karpathy/fineweb-edu-100b-shuffle/resolve/main/"


class Hub(ThreadingHTTPServer):
    """What hf_hub_download needs of the hub: HEAD with ETag and commit, GET with ranges.

    `trouble[name]` is what happens to the next GETs: "drop", "stall", "corrupt", or the bytes after which it hangs up.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files, self.trouble, self.gets = files, {}, []
        self.stalling = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def port(self) -> int:
        return self.server_address[1]

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer_head(self) -> tuple[str, bytes, int]:
        """Send the headers. Returns the file's name and content, and where it begins."""
        name, start = self.path.removeprefix(FOLDER), int(self.headers.get("Range", "bytes=0-")[len("bytes=") : -1])
        content = self.server.files.get(name)
        self.send_response(404 if content is None else 206 if start else 200)
        content = content or b""
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": "a" * 40}
        headers |= {"Accept-Ranges": "bytes", "Content-Length": len(content) - start}
        headers |= {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
        for header, value in headers.items():
            self.send_header(header, str(value))
        self.end_headers()
        return name, content, start

    def do_HEAD(self):
        self.answer_head()

    def do_GET(self):
        name, content, start = self.answer_head()
        self.server.gets.append((name, start))
        kind = (self.server.trouble.get(name) or [None]).pop(0)
        if kind == "corrupt":
            middle = len(content) // 2
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        if kind in (None, "corrupt"):
            return self.wfile.write(content[start:])
        self.wfile.write(content[start:][: kind if isinstance(kind, int) else (len(content) - start) // 2])
        self.wfile.flush()
        if kind == "stall":
            self.server.stalling.set()
            threading.Event().wait(60)
        self.close_connection = True  # the rest never comes


def environment(port: int) -> dict[str, str]:
    """The hub's client talks to this port."""
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    direct = {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return {**processes.environment(), **hub, **direct}
