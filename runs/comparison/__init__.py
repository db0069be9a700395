"""The paper's tables and claims beside what the code counts and what was measured."""
