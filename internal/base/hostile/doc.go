// Package hostile tests the program cprun on malicious inputs: configs, model directories, safetensors, checkpoints,
// run directories, token files, attention cases, environments, arguments, and clients of the metrics port. Each case
// runs cprun as a process with a limit of address space. cprun must not panic, take more than 512 MiB or 5 seconds of
// CPU time, write outside of its directory, or print control sequences. If it refuses an input, it must print an error.
// `make test-hostile` runs all cases, `go test` some of each kind.
package hostile
