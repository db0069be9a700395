"""A stand-in for the Hugging Face hub on this machine, with all the ways a download may go wrong."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import processes

FOLDER = "/datasets/karpathy/fineweb-edu-100b-shuffle/resolve/main/"


class Hub(ThreadingHTTPServer):
    """What hf_hub_download needs of the hub: HEAD with ETag and commit, GET with ranges.

    `trouble[name]` is what happens to the next GETs: "drop", "stall" or "corrupt".
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

    def send(self, status: int, length: int, **headers) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def file(self) -> tuple[str, bytes | None]:
        name = self.path.removeprefix(FOLDER)
        return name, self.server.files.get(name)

    def do_HEAD(self):
        _, content = self.file()
        if content is None:
            self.send(404, 0)
        else:
            headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X_Repo_Commit": "a" * 40}
            self.send(200, len(content), Accept_Ranges="bytes", **headers)

    def do_GET(self):
        name, content = self.file()
        if content is None:
            return self.send(404, 0)
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        self.server.gets.append((name, start))
        trouble = self.server.trouble.get(name) or [None]
        kind = trouble.pop(0)
        if start:
            self.send(206, len(content) - start, Content_Range=f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send(200, len(content))
        if kind == "corrupt":
            content = content[:-1] + bytes([content[-1] ^ 1])
        if kind in (None, "corrupt"):
            return self.wfile.write(content[start:])
        self.wfile.write(content[start : start + (len(content) - start) // 2])
        self.wfile.flush()
        if kind == "stall":
            self.server.stalling.set()
            threading.Event().wait(60)
        self.close_connection = True  # the rest never comes


def impatient(module: str) -> list[str]:
    """The words after `python` that run a module whose hub client does not wait between its attempts."""
    code = "import runpy, time\ntime.sleep = lambda seconds: None\n"
    return ["-c", f"{code}runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"]


def environment(port: int) -> dict[str, str]:
    """The hub's client talks to this port."""
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    direct = {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return {**processes.environment(), **hub, **direct}
