"""A result as something to look at: one HTML file that needs nothing else, or one picture.

`simulation.of_simulation` and `replay.of_replay` say what is shown, as plain data (`document.Report`); `drawing` draws
it, with matplotlib (the `report` extra). Whatever was not made here, such as a trace's name, is escaped where it is
shown.
"""
