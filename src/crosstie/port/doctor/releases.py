"""Releases as tools and version files write them."""

from packaging.version import InvalidVersion, Version


def release_of(text: str) -> Version | None:
    """7.0.51831-a3e329ad8 names a build behind the release; None for what is no release."""
    try:
        return Version(text.partition("-")[0])
    except InvalidVersion:
        return None
