// Package checkpoint saves and loads the state of a training run. A crash at any moment leaves a complete checkpoint,
// and any number of ranks can load the checkpoint of any other number.
//
// NewSaver and Saver.Save write checkpoints; Latest opens the newest complete one, and Checkpoint.Read reads part of a
// parameter.
//
// State is flat. All parameters follow one another in one space of elements, with gaps for padding. Each rank owns a
// contiguous range of it, as one float32 slice for each field: the weights ("param") and the optimizer's moments
// ("exp_avg", "exp_avg_sq"). A checkpoint is a directory:
//
//	checkpoints/
//	  latest                                   the name of the newest whole one
//	  step-00000100/
//	    manifest.json                          places, sizes and checksums
//	    shard-00000-of-00004.safetensors       rank 0's part, each parameter a vector
//
// The manifest maps each tensor of a shard to a part of a flattened parameter. A reader with other ranges reads only
// the parts that it needs.
//
// A save writes step-00000100.tmp-<run>/ first: every rank writes and syncs its shard; rank 0 gathers names and
// checksums, writes and syncs the manifest, renames the directory, syncs the parent and replaces latest. A directory
// without a manifest is no checkpoint. docs/formats.md describes the files for other readers.
//
// Many hosts may share the file system; docs/checkpoints.md lists the guarantees it needs. Each start of a run has a
// generation, and commits nothing once a newer start exists.
package checkpoint
