"""Makes the page that trains in the browser tab, and serves it.

Usage: python -m examples.web [--out FOLDER] [--port N] [--no-serve]

The folder (build/web) holds all that a web server needs: put it on any host for static files. onnxruntime-web comes
from npm, which is asked for it where examples/web/node_modules lacks it.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import subprocess
import sys
from collections.abc import Sequence
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HERE = Path(__file__).parent
RUNTIME = HERE / "node_modules" / "onnxruntime-web" / "dist"
# The page's two runtimes: the small one without a GPU, and the one with WebGPU.
RUNTIME_FILES = (
    "ort.wasm.min.mjs",
    "ort-wasm-simd-threaded.mjs",
    "ort-wasm-simd-threaded.wasm",
    "ort.webgpu.min.mjs",
    "ort-wasm-simd-threaded.asyncify.mjs",
    "ort-wasm-simd-threaded.asyncify.wasm",
)


class Handler(SimpleHTTPRequestHandler):
    """Serves the folder; browsers load modules and WebAssembly only under their own types."""

    extensions_map = SimpleHTTPRequestHandler.extensions_map | {
        ".js": "text/javascript",
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Do not log successful requests."""


def install() -> None:
    """Install onnxruntime-web by npm if it is missing."""
    if RUNTIME.is_dir():
        return
    if shutil.which("npm") is None:
        sys.exit(f"There is no {RUNTIME}, and no npm to fetch it: install Node.js 20.")
    print("npm fetches onnxruntime-web …", flush=True)
    subprocess.run(["npm", "install", "--omit=dev", "--prefix", str(HERE)], check=True)


def assemble(out: Path) -> None:
    """Put the page and the runtime into the folder."""
    shutil.copytree(HERE / "page", out, dirs_exist_ok=True)
    (out / "ort").mkdir(exist_ok=True)
    for name in RUNTIME_FILES:
        shutil.copy2(RUNTIME / name, out / "ort" / name)


def serve(folder: Path, port: int) -> None:
    """Serve until interrupted; port 0 selects any free port."""
    with ThreadingHTTPServer(("127.0.0.1", port), functools.partial(Handler, directory=folder)) as server:
        print(f"http://localhost:{server.server_port}/", flush=True)
        server.serve_forever()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser("python -m examples.web", description="A page that trains in the browser tab.")
    parser.add_argument("--out", type=Path, default=Path("build/web"), help="the folder of the page (build/web)")
    parser.add_argument("--port", type=int, default=8000, help="of the server on this machine (8000)")
    parser.add_argument("--no-serve", action="store_true", help="only make the folder")
    options = parser.parse_args(arguments)
    install()
    assemble(options.out)
    if not (options.out / "artifacts" / "digits.bin").exists():
        from examples.web.artifacts import make  # noqa: PLC0415  PyTorch is needed only to make them

        print("PyTorch's module becomes training graphs, and learns scikit-learn's digits …")
        print(f"It reads {make(options.out / 'artifacts'):.1%} of the digits that it has not seen.")
    if not options.no_serve:
        try:
            serve(options.out, options.port)
        except KeyboardInterrupt:
            print()
        except OSError as error:
            sys.exit(f"Port {options.port} cannot be used ({error.strerror}): give another with --port.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
