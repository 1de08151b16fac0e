"""Data sets in the formats of other loaders: MosaicML Streaming (MDS) and LitData."""
