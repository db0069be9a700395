from runs.looks import *  # noqa: F403 (the name of this file until its users have moved)
