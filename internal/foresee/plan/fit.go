package plan

import (
	"fmt"

	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/partition"
)

// lossChunks lists numbers of tokens with logits in memory at once on a GPU. More than the largest make no matrix
// product faster; fewer than the second cost some speed.
var lossChunks = []int{8192, 4096, 2048, 1024}

// goodChunks counts the chunks that are worth less recompute.
const goodChunks = 2

// Fit decides memory.recompute and memory.loss_chunk if a resolved config for a GPU leaves
// them auto: the least recompute that fits the machine's memory, then the largest chunk; full
// recompute if nothing fits, or selective if the memory is not known. It returns the memory
// that the run then takes, which may not fit: see Memory.Check.
func Fit(cfg *config.Config, ranks int, machine machine.Machine) (Memory, error) {
	d, err := demandOf(cfg, machine, nil)
	if err != nil {
		return Memory{}, err
	}
	m, err := fit(cfg, ranks, machine, d)
	return m.advised(memoryOf, cfg, ranks, machine, d), err
}

// fit does what Fit does for a known demand of the schedules.
func fit(cfg *config.Config, ranks int, machine machine.Machine, d *demand) (m Memory, err error) {
	auto := cfg.Memory
	recomputes, chunks := []string{auto.Recompute}, []int{auto.LossChunk}
	if auto.Recompute == "auto" {
		recomputes = []string{"none", "selective", "full"}
		if machine.Memory == 0 {
			recomputes = []string{"selective"}
		}
	}
	good := 1
	if auto.LossChunk == 0 {
		tokens, err := mostTokens(cfg)
		if err != nil {
			return m, err
		}
		chunks, good = upTo(max(1, tokens)), goodChunks
	}
	for i, r := range recomputes {
		try := chunks[:min(good, len(chunks))]
		if i == len(recomputes)-1 {
			try = chunks
		}
		for _, n := range try {
			cfg.Memory.Recompute, cfg.Memory.LossChunk = r, n
			m, err = memoryOf(cfg, ranks, machine, d)
			if err != nil || m.Fits {
				return m, err
			}
		}
	}
	return m, nil // the last is the smallest
}

// Check returns an error if the run does not fit the machine's memory.
func (m *Memory) Check() error {
	if m.Fits {
		return nil
	}
	return fmt.Errorf("this run %s; cprun plan lists what it takes", m.Verdict())
}

// upTo returns the chunks for that many tokens of one pass.
func upTo(tokens int) (chunks []int) {
	for _, n := range lossChunks {
		if c := max(min(n, tokens), tokens/config.MaxPieces); len(chunks) == 0 || c < chunks[len(chunks)-1] {
			chunks = append(chunks, c)
		}
	}
	return chunks
}

// mostTokens returns the tokens of one pass of the rank that has most.
func mostTokens(cfg *config.Config) (int, error) {
	shape, err := shapeOf(cfg, nil, windowsOf(cfg)[0].window)
	if err != nil {
		return 0, err
	}
	most := 0
	for r := range shape.Size {
		most = max(most, partition.Count(shape.Layout.Spans(shape.SeqQ, shape.Size, r)))
	}
	return most * cfg.Train.MicroBatchSize, nil
}
