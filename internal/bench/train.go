package bench

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"

	"github.com/cprun/cprun/internal/files"
	"github.com/cprun/cprun/internal/metrics"
)

// Summarise sets the figures of t from the steps of a run, of which the first t.Skipped are
// left out of the medians: they compile, allocate and warm up.
func (t *Training) Summarise(steps []metrics.Step) error {
	if len(steps) <= t.Skipped {
		return fmt.Errorf("%d steps were logged; want more than the %d that are left out", len(steps), t.Skipped)
	}
	var seconds, tokens, tflops, mfu, wait []float64
	for i, s := range steps {
		t.Steps, t.Loss = append(t.Steps, float64(s.StepSeconds)), append(t.Loss, s.Loss)
		t.Memory = max(t.Memory, s.MemoryBytes)
		if i < t.Skipped {
			continue
		}
		for _, f := range []struct {
			of   *[]float64
			what metrics.Float
		}{
			{&seconds, s.StepSeconds}, {&tokens, s.TokensPerSecondPerDevice}, {&tflops, s.TFLOPsPerDevice}, {&mfu, s.MFU}, {&wait, s.CommWaitSeconds},
		} {
			if f.what.Known() {
				*f.of = append(*f.of, float64(f.what))
			}
		}
	}
	t.StepSeconds, t.TokensPerSecond, t.TFLOPs = Median(seconds), Median(tokens), Median(tflops)
	t.MFU, t.CommWait = Median(mfu), metrics.Absent
	if len(wait) > 0 {
		t.CommWait = metrics.Float(Median(wait))
	}
	return nil
}

// ReadMetrics reads a metrics.jsonl.
func ReadMetrics(path string) ([]metrics.Step, error) {
	f, err := files.Open(path)
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	defer f.Close()
	var steps []metrics.Step
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		var s metrics.Step
		if err := json.Unmarshal(lines.Bytes(), &s); err != nil {
			return nil, fmt.Errorf("%s: line %d: %w", path, len(steps)+1, err)
		}
		steps = append(steps, s)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return steps, nil
}

// WriteTokens writes a file of n random tokens of a vocabulary, in llm.c's format: a header of
// 1024 bytes (magic, version, count), then uint32 tokens.
func WriteTokens(path string, n, vocab int, seed uint64) error {
	err := files.WriteTo(path, func(f *files.Draft) error { return writeTokens(f, n, vocab, seed) })
	if err != nil {
		return fmt.Errorf("random tokens: %w", err)
	}
	return nil
}

// writeTokens writes what WriteTokens says.
func writeTokens(f io.Writer, n, vocab int, seed uint64) error {
	const header, magic, version = 1024, 20240801, 7
	w := bufio.NewWriterSize(f, 1<<20)
	le := binary.LittleEndian
	var head [header]byte
	le.PutUint32(head[:], magic)
	le.PutUint32(head[4:], version)
	le.PutUint32(head[8:], uint32(n))
	w.Write(head[:]) // Flush returns the first error
	rng := rand.New(rand.NewPCG(seed, 0))
	var b [4]byte
	for range n {
		le.PutUint32(b[:], uint32(rng.IntN(vocab)))
		w.Write(b[:])
	}
	return w.Flush()
}
