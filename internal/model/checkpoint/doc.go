// Package checkpoint saves and loads the state of a training run so that a crash at any
// moment leaves a whole checkpoint, and any number of ranks can load the checkpoint of any other
// number.
//
// State is flat. All parameters follow one another in one space of elements, gaps for
// padding allowed; each rank owns a contiguous range of it, and holds one float32 slice of
// that range for each field: the weights ("param") and whatever the optimizer keeps beside
// them ("exp_avg", "exp_avg_sq"). A checkpoint is a directory,
//
//	checkpoints/
//	  latest                                   the name of the newest whole one
//	  step-00000100/
//	    manifest.json                          places, sizes and checksums
//	    shard-00000-of-00004.safetensors       rank 0's part, each parameter a vector
//
// in which the manifest says which part of which flattened parameter a tensor of a shard is.
// A reader with other ranges reads the parts it needs, and nothing else.
//
// A save writes step-00000100.tmp-<run>/ beside: every rank writes and syncs its shard, rank
// 0 gathers names and checksums, writes and syncs the manifest, renames the directory, syncs
// the parent and replaces latest. What has no manifest was never a checkpoint. docs/formats.md
// describes the files for readers that are not cprun.
//
// The file system is one that many hosts may share, and is trusted with little: docs/checkpoints.md
// says with what. Each start of a run has a generation, and commits nothing once a newer one has
// begun.
package checkpoint
