// Package config reads train.yaml: its types, defaults and rules. Load returns a resolved Config, or every fault at
// once as Errors: each with file, line, key and fix. No other package knows a default. The table in keys.go defines the
// keys; docs/config.md lists them.
//
//	cfg, err := config.Load("train.yaml", config.Options{Ranks: 8, Device: "cuda"})
package config

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/text/data"
	"github.com/cprun/cprun/ring"
)

// Config is a resolved train.yaml.
type Config struct {
	// These are the sections; docs/config.md lists their keys.
	Model      Model
	Data       Data
	Train      Train
	Optimizer  Optimizer
	LRSchedule LRSchedule
	Parallel   Parallel
	Attention  Attention
	Precision  Precision
	Memory     Memory
	Checkpoint Checkpoint
	Log        Log

	// Warnings lists allowed values that are probably mistakes. YAML and Map ignore it.
	Warnings Errors

	counted bool    // train.steps follows from train.samples
	ratio   float64 // LRSchedule.WarmupRatio before the steps were known

	where *positions // of keys, for errors of Resolve; nil for a config made in code
}

// Model is the shape of the model and the source of its weights.
type Model struct {
	From      string // Hugging Face directory, absolute; empty for random weights
	hf.Config        // resolved: config.json of From, overridden by the keys in the YAML

	ResizeEmbeddings int // rows of the embedding in place of those of From; 0: these
}

// Data is the source of tokens.
type Data struct {
	Path         Files
	Format       string // of records: auto, text, messages, completion, tokens
	ChatTemplate string // absolute path of a Jinja file; "": the tokenizer's own
	TrainOn      string // of conversations: assistant, all
	Tokenizer    string // Bytes, or the absolute path of a tokenizer.json; "": none, and text is refused
	SeqLen       int    // global tokens of one sample
	Shuffle      bool
	Pack         *bool  // data.pack_documents; nil: auto, which depends on the files
	Overlong     string // auto, split, drop
	EOSTokenID   int    // -1: none
	Cache        string // directory of the token cache, absolute; "": the user's cache directory
	Seed         int64
	Validation   Validation

	// PackDocuments follows from the others: the mask and the positions depend on the documents of a sample.
	PackDocuments bool

	known bool         // Options.Known
	note  func(string) // Options.Note
}

// uncached is the size of files below which the default cache is not used, in bytes.
const uncached = 16 << 20

// TokenCache returns the cache of encoded files.
func (d *Data) TokenCache() data.Cache {
	c := data.Cache{Dir: d.Cache, Known: d.known, Note: d.note}
	if dir, err := os.UserCacheDir(); c.Dir == "" && err == nil {
		c.Dir, c.Least = filepath.Join(dir, "cprun", "tokens"), uncached
	}
	return c
}

// Packs reports whether data.pack_documents is true.
func (d *Data) Packs() bool { return d.Pack != nil && *d.Pack }

// Whole reports whether documents of these files are never cut.
func (d *Data) Whole(f Files) bool {
	return d.Overlong == "drop" || d.Overlong == "auto" && f.conversations()
}

// Validation is the held-out loss: every N steps (0: never), over N samples (0: all).
type Validation struct {
	Path           Files // none if Every is 0
	Every, Samples int
}

// Train is the length and the batches of the run.
type Train struct {
	Steps           int // 0: those of Epochs, once ResolveEpochs has counted them
	Epochs          int // 0: Steps
	Samples         int // after which the run ends; 0: only Steps end it
	GlobalBatchSize int // samples of one optimizer step, over all data-parallel groups
	MicroBatchSize  int
	Seed            int64
	Deterministic   bool
	EarlyStop       EarlyStop
}

// EarlyStop ends a run after Patience validations (0: never) that do not lower the loss by more than MinDelta.
type EarlyStop struct {
	Patience int
	MinDelta float64
}

// Optimizer is AdamW (arXiv:1711.05101).
type Optimizer struct {
	Name        string
	LR          float64
	Betas       [2]float64
	Eps         float64
	WeightDecay float64
	GradClip    float64 // largest global norm; 0: no clipping
}

// LRSchedule is the learning rate over the steps.
type LRSchedule struct {
	Name        string // cosine, linear, constant, wsd
	WarmupSteps int    // -1: those of WarmupRatio, once the steps are known
	WarmupRatio float64
	MinLR       float64
}

// Parallel groups the ranks. 0 is auto; Resolve replaces it once the number of ranks is known.
type Parallel struct {
	Context int // ranks that share one sequence
	Data    int // groups of such ranks
	// Strategy selects the attention algorithm, its layout and attention.backend. A field may be auto until ranks and
	// machine are known; Gather may stay auto. Inner is 0 except with hierarchical.
	ring.Strategy
	Transport string // nccl, copy, auto; stays auto

	Deadline time.Duration // limit of a rank's wait in one transfer; 0: auto
}

// Attention has options of the attention kernels. Parallel has their backend.
type Attention struct {
	SMMargin int // processors of a GPU that flash leaves free
	Debug    int
}

// Precision holds the types of computation and transfers.
type Precision struct {
	Compute  string // bf16, fp16, fp32, auto
	GradWire string // fp32, bf16
}

// Memory selects the state that is kept, recomputed, chunked and sharded.
type Memory struct {
	Recompute string // none, selective, full, auto
	LossChunk int    // tokens with logits in memory at once; 0: auto
	Shard     string // none, optimizer, gradients, parameters, auto
	Offload   string // off, activations, optimizer, both, auto
	Reserve   Reserve
}

// Offloads report whether activations, and masters and moments, move to host memory. auto does not, until a plan
// replaces it.
func (m *Memory) Offloads() (activations, optimizer bool) {
	both := m.Offload == "both"
	return both || m.Offload == "activations", both || m.Offload == "optimizer"
}

// Reserve is the device memory that plans leave free: a share such as 3%, or a size such as 4G. "" is auto.
type Reserve string

const autoReserve Reserve = "3%"

// Of returns the bytes to leave free on a device with this memory.
func (r Reserve) Of(memory int64) int64 {
	share, bytes, err := cmp.Or(r, autoReserve).parse()
	if err != nil {
		panic("config: memory.reserve was not checked: " + err.Error())
	}
	return bytes + int64(share*float64(memory))
}

// parse returns the share or the bytes.
func (r Reserve) parse() (share float64, bytes int64, err error) {
	if percent, ok := strings.CutSuffix(string(r), "%"); ok {
		if share, err = ParseFloat(percent); err == nil && !(share >= 0 && share < 100) {
			err = fmt.Errorf("%s is out of range; want at least 0%% and less than 100%%", clipped(string(r)))
		}
		return share / 100, 0, err
	}
	bytes, err = ParseSize(string(r))
	switch {
	case err != nil:
		err = fmt.Errorf("%w, or a share such as 3%%", err)
	case bytes > 0 && bytes < 1<<20:
		err = fmt.Errorf("%d bytes are no reserve; write a size such as 4G, or %d%% for a share", bytes, bytes)
	}
	return 0, bytes, err
}

// Checkpoint sets how often state is saved and how many checkpoints are kept. A run also saves at its end and on a
// request to stop.
type Checkpoint struct {
	Every    int           // optimizer steps between two; 0: not by steps
	Interval time.Duration // since the last; 0: not by time
	Keep     int           // the newest are kept; 0: all
	Async    *bool         // written during training, from a copy; nil: auto, if the host's memory holds the copy
	Best     bool          // also after a validation with the lowest loss so far; kept
}

// Copies reports whether checkpoints between the steps are written from a copy of the state, during training. auto
// copies, until a plan replaces it.
func (c *Config) Copies() bool {
	p := &c.Checkpoint
	some := p.Every > 0 && (c.Train.Steps == 0 || p.Every < c.Train.Steps) || p.Interval > 0 || p.Best
	return some && (p.Async == nil || *p.Async)
}

// Log sets the reports during training.
type Log struct {
	Every       int // 0: auto
	Samples     Samples
	TensorBoard bool
	Prometheus  string // address to listen on; "" for none
	TraceSteps  int
}

// Bounds of log.samples, for its time and memory: prompts, and tokens of a prompt and of an answer.
const (
	MaxPrompts = 10
	MaxPrompt  = 1024
	MaxAnswer  = 64
)

// Samples sets the prompts that the model answers during training.
type Samples struct {
	Every   int // 0: none
	Prompts []string
}

// Deadline limits the wait of a rank in one transfer if parallel.deadline is auto and no steps have been timed.
const Deadline = 5 * time.Minute

// TransferTimeout returns the limit of a rank's wait in one transfer.
func (p *Parallel) TransferTimeout() time.Duration { return cmp.Or(p.Deadline, Deadline) }
