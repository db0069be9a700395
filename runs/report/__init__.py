"""The report: one HTML page, without network or server, of what was trained and measured.

`trained` finds the runs, `provenance` says what ran where, `curves`, `benchmarks`, `attention` (vision) and
`language` draw, `live` stores what the live views need, `build` orders the sections, and `page` puts them into
`template/`. `blocks` has what sections are made of.
"""
