// Package run is a wing of packages that run in a worker process.
//
//	worker -> train, attend, bench    the life of a rank's process
//	job                               the messages of launcher and workers
//	train, generate                   the training loop; text from a checkpoint
//	attend, bench                     attention on tensors of a file; benchmarks
package run
