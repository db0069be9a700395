"""The study's forms of attention, for `--forms runs.study.forms`: what GKA and softmax attention are compared with.

config      the settings, what they may be together, and the trainer's flags for them
mixing      other ways to meet the token before
attention   the layers that have them, and what stands in the place of the kernel
"""

from nanochat_gka.model import forms
from runs.study.forms import config

NAME = __name__
forms.register(config.StudyShape, config.StudyFlags)
