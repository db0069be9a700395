"""Whether other users of the machine could have written a file, or could exchange it: what is loaded is run."""

import os
import stat
from pathlib import Path


def distrust(path: Path) -> str | None:
    """Why a file or folder must not be loaded from, or None.

    It and every folder above it, behind links, must be owned by this user or root, and be writable by nobody else: who
    can write into a folder can exchange what is in it. Above it a folder such as /tmp may be writable by all if it is
    sticky, so that only owners exchange their own.
    """
    path = path.resolve()
    for place in (path, *path.parents):
        status = place.stat()
        if status.st_uid not in (0, os.geteuid()):
            return f"{place} is owned by {_user(status.st_uid)}"
        sticky = place != path and status.st_mode & stat.S_ISVTX
        if _writable_by_others(status) and not sticky:
            return f"others may write to {place} (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _writable_by_others(status: os.stat_result) -> bool:
    """Of groups, all but one of the user's name without other members: many systems have one for each user."""
    if not status.st_mode & stat.S_IWGRP:
        return bool(status.st_mode & stat.S_IWOTH)
    import grp  # not on every system

    try:
        group = grp.getgrgid(status.st_gid)
    except KeyError:
        return True
    user = _user(os.geteuid())
    return bool(status.st_mode & stat.S_IWOTH) or group.gr_name != user or not {user}.issuperset(group.gr_mem)


def _user(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
