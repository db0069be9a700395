"""The paper's experiments and benchmarks, and their records."""

from trainkit_gka import importing

importing(__name__)
