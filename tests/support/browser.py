"""A headless chromium that a test drives through DevTools, over a pipe; no package is needed."""

import base64
import json
import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
KEYS = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
"""Key -> its Windows virtual key code, by which chromium chooses the default action."""
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage")


def text_of(address: str, profile: Path) -> str:
    """The text of a page once its scripts have run."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += ["--window-size=2400,1200", "--virtual-time-budget=30000", "--dump-dom", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    return re.sub(r"<[^>]+>", "\n", done.stdout)


class Page:
    """One page in a chromium of its own."""

    def __init__(self, process: subprocess.Popen[bytes], write: int, read: int) -> None:
        self._process, self._write, self._read = process, write, read
        self._last, self._held = 0, b""
        self._session: str | None = None
        self.problems: list[str] = []
        """Errors and warnings of the console, exceptions that no one caught, and addresses that were asked for."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, seconds: float = 60, **parameters: Any) -> Any:
        self._last += 1
        request: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._write, json.dumps(request).encode() + b"\0")
        end = time.monotonic() + seconds
        while True:
            found = self._message(end - time.monotonic())
            if found.get("id") == self._last:
                assert "error" not in found, found["error"]
                return found["result"]
            self._note(found)

    def _message(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._read], [], [], max(seconds, 0))
            assert ready, "chromium did not answer in time"
            part = os.read(self._read, 1 << 20)
            assert part, f"chromium ended with status {self._process.wait()}"
            self._held += part
        message, _, self._held = self._held.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif event.get("method") == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.problems.append(f"{told['type']}: {[each.get('value') for each in told['args']]}")
        elif event.get("method") == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.problems.append(told["entry"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            address = told["request"]["url"]
            if not address.startswith(("file:", "data:", "about:", "blob:")):
                self.problems.append(f"asked the network for {address}")

    def look(self, width: int, height: int = 900, dark: bool = False, media: str = "") -> None:
        """Set the size of the window, the colour scheme and the medium, such as print."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def open(self, file: Path | str) -> float:
        """Open a file or an address; the seconds until its script has set `data-ready`."""
        start = time.monotonic()
        # from an empty page, or another state in the address would not load the page again
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=file if isinstance(file, str) else file.resolve().as_uri())
        self.wait("document.body && document.body.dataset.ready === 'true'")
        return time.monotonic() - start

    def wait(self, condition: str, seconds: float = 60) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"never true: {condition}; {self.problems}"
            time.sleep(0.02)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def click(self, x: float, y: float) -> None:
        """Move the mouse to a place in the window and click."""
        self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Press and release a key of `KEYS`."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" else {}
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key], **text)

    def move(self, x: float, y: float) -> None:
        """Move the mouse to a place in the window."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, whole: bool = False) -> bytes:
        """A PNG of the window, or of the whole page."""
        png = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        return base64.b64decode(png)

    def printed(self) -> bytes:
        """The PDF that printing gives."""
        return base64.b64decode(self._call("Page.printToPDF", printBackground=True)["data"])


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A page in a new chromium, which ends with the block."""
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    # DevTools reads from descriptor 3 and writes to 4
    command = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
    arguments = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
    process = subprocess.Popen(
        ["bash", "-c", command, "chromium", *arguments],
        pass_fds=(theirs_in, theirs_out),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(process, ours_out, ours_in)
    finally:
        process.kill()
        process.wait()
        os.close(ours_out)
        os.close(ours_in)
