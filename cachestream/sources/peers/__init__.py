"""Data sets in the formats of other loaders: MosaicML's MDS and Lightning's LitData."""
