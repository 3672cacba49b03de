"""What a run leaves behind and shows: its folder, its plot, its progress.

Import the modules themselves: `plots` needs matplotlib, `progress` needs rich.
"""
