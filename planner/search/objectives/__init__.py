"""What a search may vary instead of the strategy, and how far that reaches.

- `objective`: the length of the clip, the batch, the size, the rank: their possible values, how to read and set them.
- `reach`: how far a few strategies reach, by quick estimates.
- `largest`: the largest value for which a plan fits.
- `longest_clip`: the same on each class of card.
- `relaxed`: where nothing fits, each single wish whose relaxing is enough.
"""
