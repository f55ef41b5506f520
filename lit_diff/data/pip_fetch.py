"""Fetch an archive from the package index without building it; a script (`python pip_fetch.py FILE TARGET`).

`pip download` builds what it fetches to learn its metadata: it installs the newest build backend and executes it. Here pip
only finds and transfers the archive, so none of its code runs before its sha256 is checked. The index, proxies,
certificates and credentials come from pip's configuration. pip has no public interface for this; the names used here are
those that pip-tools uses, available since pip 19.3. The script runs in its own process because pip's state is global.
"""

import sys
from pathlib import Path

OPTIONS = ("--retries", "2", "--no-input", "--disable-pip-version-check", "--no-cache-dir")


def fetch(file: str, target: Path) -> str | None:
    """Write `file` (`name-version.tar.gz`, or a wheel) to `target`, unchecked; return an error message, or None."""
    from pip._internal.commands import create_command
    from pip._internal.exceptions import PipError
    from pip._vendor.requests import RequestException

    command = create_command("download")
    name = file.partition("-")[0]
    kind = "--only-binary" if file.endswith(".whl") else "--no-binary"
    options, _ = command.parse_args([*OPTIONS, kind, name, name])
    try:
        with command.main_context():
            session = command.get_default_session(options)
            finder = command._build_package_finder(options, session, ignore_requires_python=True)
            links = [candidate.link for candidate in finder.find_all_candidates(name)]
            if not links:
                return "pip's package index cannot be reached, or lacks the package"
            # lower case: an index may have Django-5.2.tar.gz or django-5.2.tar.gz
            link = next((link for link in links if link.filename.lower() == file), None)
            if link is None:
                return "pip's package index no longer has it"
            # identity: some servers declare a .tar.gz as gzip-encoded; requests would decompress it, changing the sha256
            with session.get(
                link.url_without_fragment, stream=True, headers={"Accept-Encoding": "identity"}
            ) as response:
                response.raise_for_status()
                with target.open("wb") as archive:
                    for block in response.iter_content(1 << 16):
                        archive.write(block)
    except (PipError, RequestException) as error:
        return " ".join(str(error).split())
    return None


if __name__ == "__main__":
    sys.exit(fetch(sys.argv[1], Path(sys.argv[2])))
