package train

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/text/data"
	"github.com/cprun/cprun/partition"
)

// Check checks the files of a config before any process is spawned: too little data, tokens outside the vocabulary,
// weights that do not fit. It reports all faults, each at the line of its key. It returns the amount of data; nil if
// that is at fault, or is not in the token cache and may not be encoded. Without faults, it resolves train.epochs.
func Check(cfg *config.Config) (*plan.Data, error) {
	var all config.Errors
	note := func(key string, err error) {
		var faults config.Errors
		if err != nil && errors.As(cfg.Fault(key, err), &faults) {
			all = append(all, faults...)
		}
	}
	tok := tokenizerOf(cfg)
	check := func(key string, files config.Files, most int) *plan.Data {
		found, err := checkData(cfg, files, tok, int64(most))
		if errors.Is(err, data.ErrNotCounted) {
			return nil
		}
		if bad := (*data.TokenizerError)(nil); errors.As(err, &bad) {
			key = "data.tokenizer"
		} else if errors.Is(err, data.ErrNoTokenizer) {
			key, err = "data.tokenizer", fmt.Errorf("%w: %s", err, cfg.NoTokenizer())
		}
		note(key, err)
		return found
	}
	found := check("data.path", cfg.Data.Path, 0)
	ofTokenizer := func(f config.Fault) bool { return f.Key == "data.tokenizer" }
	if v := cfg.Data.Validation; v.Every > 0 && len(v.Path) > 0 && !slices.ContainsFunc(all, ofTokenizer) {
		for i := range v.Path {
			check("data.validation.path", v.Path[i:i+1], v.Samples)
		}
	}
	if cfg.Log.Samples.Every > 0 && !slices.ContainsFunc(all, ofTokenizer) {
		_, err := promptsOf(cfg, tok)
		note("log.samples.prompts", err)
	}
	if cfg.Model.From != "" {
		note("model.from", checkWeights(cfg, hf.OpenWeights, cfg.Model.From, func(w *hf.Weights) error {
			return w.Check(cfg.Model.Tensors())
		}))
	}
	if l := cfg.Model.Tuning.LoRA; l != nil && l.From != "" {
		note("lora.from", checkWeights(cfg, hf.OpenAdapter, l.From, func(w *hf.Weights) error {
			return w.CheckAdapter(&cfg.Model.Config)
		}))
	}
	if len(all) > 0 {
		return found, all
	}
	if found == nil {
		return nil, nil
	}
	return found, cfg.ResolveEpochs(found.EpochSamples)
}

func checkWeights(cfg *config.Config, open func(string) (*hf.Weights, error), path string,
	check func(*hf.Weights) error) error {
	w, err := open(path)
	if err != nil {
		return err
	}
	defer w.Close()
	err = check(w)
	if note := w.Note(); note != "" {
		cfg.Warn("model.from", note)
	}
	return err
}

// FirstDocuments returns the document lengths of the first sample of a run; nil if documents are not separate, or not
// known. The files of the config must have been checked.
func FirstDocuments(cfg *config.Config) ([]int, error) {
	if !cfg.Data.PackDocuments {
		return nil, nil
	}
	sources, err := openData(cfg, cfg.Data.Path, tokenizerOf(cfg))
	if errors.Is(err, data.ErrNotCounted) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return firstOf(cfg, cfg.Data.Path, sources)
}

// firstOf returns the document lengths of the first sample of a run over files.
func firstOf(cfg *config.Config, files config.Files, sources []*data.Dataset) ([]int, error) {
	l, err := cutData(cfg, files, sources, cfg.Data.Shuffle)
	if err != nil {
		return nil, err
	}
	return filled(l.Docs(l.Index(0)), cfg.Data.SeqLen), nil
}

// checkedTokens bounds the tokens that are checked before training, about a second's work. Training checks the rest.
const checkedTokens = 64 << 20

// pairSamples bounds the samples from which Data.SamplePairs is estimated.
const pairSamples = 1024

// checkData opens and counts files as a run does, and reads them if they are not too large. If most is not 0, one of
// the first most samples must have a target.
func checkData(cfg *config.Config, files config.Files, tok *data.Tokenizer, most int64) (*plan.Data, error) {
	sources, err := openData(cfg, files, tok)
	if err != nil {
		return nil, err
	}
	l, err := cutData(cfg, files, sources, false)
	if err != nil {
		return nil, err
	}
	targets := 0
	for s := int64(0); s < min(most, l.Samples()) && targets == 0; s++ {
		targets += l.Valid(s)
	}
	if most > 0 && targets == 0 {
		return nil, fmt.Errorf("the first %d samples have no targets; use more", most)
	}
	batch := int64(cfg.Train.GlobalBatchSize)
	found := &plan.Data{Samples: l.Samples(), SampleTokens: l.Tokens(), Targets: l.Targets(),
		StepsPerEpoch: (l.Epoch() + batch - 1) / batch, EpochSamples: l.Epoch()}
	if cfg.Data.PackDocuments && most == 0 {
		if found.First, err = firstOf(cfg, files, sources); err != nil {
			return nil, err
		}
	}
	var lengths data.Lengths
	if n := min(found.Samples, pairSamples); !l.Alike() {
		for i := range n { // from all parts of the data
			found.SamplePairs += model.VisiblePairs(l.Docs(i*found.Samples/n), -1)
		}
		found.SamplePairs /= float64(n)
	}
	if found.DroppedDocuments, lengths = l.Dropped(); found.DroppedDocuments > 0 {
		found.Retention = lengths.Kept(cfg.Data.SeqLen)
	}
	left, documents, counted := int64(checkedTokens), int64(0), true
	var ignored, warnings data.Keys
	for _, ds := range sources {
		left -= ds.Len()
		n, err := ds.Check(left >= 0)
		if err != nil {
			return nil, err
		}
		counted, documents = counted && n >= 0, documents+n
		found.Files, found.Tokens = found.Files+ds.Files(), found.Tokens+ds.Len()
		ignored.Add(ds.Ignored()...)
		warnings.Add(ds.Notes()...)
	}
	if counted {
		found.Documents = &documents
	}
	found.HeldBytes = l.Held()
	for _, ds := range sources {
		found.EncodingBytes += ds.Encoding()
	}
	found.Ignored, found.Warnings = ignored.Sorted(), warnings.Sorted()
	return found, nil
}

// A load describes the attention work of a step for the ranks of a context group.
type load struct {
	// slowest and mean count the visible pairs of all heads, on the rank with most and on average. They are summed over
	// layers and sequences, since the ranks wait for each other after each.
	slowest, mean float64
	sent          int64 // bytes sent by this rank
}

func (l *load) add(o load, times int) {
	l.slowest += float64(times) * o.slowest
	l.mean += float64(times) * o.mean
}

// imbalance returns the work of the slowest rank over the mean rank's, or 1 without work.
func (l *load) imbalance() float64 {
	if l.mean == 0 {
		return 1
	}
	return l.slowest / l.mean
}

// loadOf returns the work of one layer for one sequence. traders is the number of ranks that exchange heads.
func loadOf(shape partition.Shape, traders, heads int) (l load) {
	work := partition.WorkOfHeads(partition.Work(shape), traders, heads)
	l.slowest = float64(slices.Max(work))
	for _, n := range work {
		l.mean += float64(n) / float64(len(work))
	}
	return l
}

// tally counts the bytes that a ring sends.
type tally struct {
	comm.Exchanger
	sent int64
}

// Exchange implements comm.Exchanger.
func (t *tally) Exchange(send, recv []comm.Message) (comm.Pending, error) {
	for i := range send {
		t.sent += int64(send[i].View.Size()) * int64(send[i].View.DType().Size())
	}
	return t.Exchanger.Exchange(send, recv)
}
