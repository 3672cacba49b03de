"""A headless Chromium for the tests of pages, over its debugging pipe; no library is needed.

``BROWSER`` is ``None`` where no Chromium is installed (then those tests are skipped).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One page in a browser of its own: ``with Tab(path) as tab: tab.run("1 + 1")``."""

    def __init__(self, page: Path, width: int = 1300, height: int = 1000, dark: bool = False) -> None:
        assert BROWSER is not None
        self.profile = tempfile.mkdtemp(prefix="chromium-")
        to_browser, ours_out = os.pipe()
        ours_in, from_browser = os.pipe()
        low, high = os.dup(to_browser), os.dup(from_browser)

        def wire() -> None:
            os.dup2(low, 3)
            os.dup2(high, 4)

        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            "--no-first-run",
        ]
        flags += ["--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={self.profile}"]
        self.process = subprocess.Popen(
            [BROWSER, *flags, "about:blank"],
            close_fds=False,
            preexec_fn=wire,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for used in (to_browser, from_browser, low, high):
            os.close(used)
        self.input, self.output = os.fdopen(ours_out, "wb", buffering=0), os.fdopen(ours_in, "rb")
        self.number = 0
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page_id = next(target["targetId"] for target in targets if target["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page_id, flatten=True)["sessionId"]
        for domain in ("Runtime", "Network", "Page", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait("document.readyState === 'complete'")

    def __enter__(self) -> Tab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.wait(timeout=20)
        self.input.close()
        self.output.close()
        shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.input.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self.output.read(1)) != b"\0":
            assert byte, "the browser has gone"
            data += byte
        return json.loads(data)

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression is true, at most ten seconds."""
        condition = f"(() => {{ try {{ return Boolean({script}); }} catch {{ return false; }} }})()"
        loop = f"""new Promise((done) => {{ const end = Date.now() + 10000;
            const look = () => {{ if ({condition}) done(true);
                else if (Date.now() > end) done(false); else setTimeout(look, 20); }};
            look(); }})"""
        assert self.run(loop), f"never true: {script}"

    def press(self, *keys: str) -> None:
        for key in keys:
            for kind in ("keyDown", "keyUp"):
                text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
                self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)
        self.settle()

    def point(self, script: str) -> None:
        """Move the pointer over the middle of an element."""
        self.run(f"({script}).scrollIntoView({{block: 'center'}})")
        x, y = self.run(
            f"(() => {{ const r = ({script}).getClientRects()[0];"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def settle(self) -> None:
        """Wait for two frames."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def complaints(self) -> list[str]:
        """Errors of scripts and in the log, and every request that is not for the page itself."""
        self.settle()
        found = []
        for event in self.events:
            method, about = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(about["exceptionDetails"].get("exception", {}).get("description")))
            elif method == "Log.entryAdded":
                found.append(about["entry"]["text"])
            elif method == "Network.requestWillBeSent" and about["type"] != "Document":
                found.append(f"request for {about['request']['url'][:200]}")
        return found
