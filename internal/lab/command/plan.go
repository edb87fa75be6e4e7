package command

import (
	"cmp"
	"fmt"
	"math"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/foresee/cost"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/run/train"
	"github.com/cprun/cprun/internal/text/data"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/ring"
)

// PlanOptions are the flags of `cprun plan`.
type PlanOptions struct {
	Options
	Set    []string
	Model  string   // a Hugging Face directory or Hub id, in place of model.from; then the config may be ""
	SeqLen string   // in place of data.seq_len
	Assume []string // properties of another machine to plan for
	JSON   bool
	// Verbose also prints the config, the partition, the hops and the other backends.
	Verbose bool
	Longest bool // plans for the longest sequence that fits
}

// planGC is the GOGC of commands that plan. Each choice that they try leaves up to a megabyte of garbage, and with Go's
// default a third of their time collects it.
const planGC = 400

// Plan prints the plan of a config, on this machine or an assumed one. The path "" is a config of defaults.
func Plan(path string, o PlanOptions) (int, error) {
	defer debug.SetGCPercent(debug.SetGCPercent(planGC))
	if o.Model != "" {
		o.Set = append(o.Set, "model.from="+o.Model)
	}
	if o.SeqLen != "" {
		o.Set = append(o.Set, "data.seq_len="+o.SeqLen)
	}
	machine, ranks, err := o.where()
	if err != nil {
		return 0, err
	}
	if o.Longest {
		if err := o.setLongest(path, machine, ranks); err != nil {
			return 0, err
		}
	}
	d, err := o.decider(machine)
	if err != nil {
		return 0, err
	}
	cfg, err := loadPlanned(path, config.Options{Set: o.Set, Ranks: ranks, Hosts: machine.Hosts,
		Device: machine.Device(), NoFiles: true, Known: true, Decide: d.Decide})
	if err != nil {
		return 0, &InputError{err}
	}
	choice, err := choose(cfg, machine)
	if err != nil {
		return 0, err
	}
	for _, line := range choice.notes {
		fmt.Fprintln(o.Stderr, terminal.Text(line))
	}
	opts := plan.Options{Machine: machine, Choice: choice.Choice, Costs: o.costs(machine), Chosen: d.Chosen}
	var found *plan.Data
	var refusal error
	if path != "" {
		found, refusal = o.refusal(path, cfg, ranks, machine)
	}
	if opts.Data = found; found != nil {
		opts.Docs = found.First
		if err := cfg.ResolveEpochs(found.EpochSamples); err != nil {
			return 0, &InputError{err}
		}
	}
	opts.Refused = lines(refusal)
	p, err := plan.Make(cfg, ranks, opts)
	if err != nil {
		return 0, &InputError{err}
	}
	if len(o.Assume) == 0 && o.JSON { // the text begins with it
		p.Refused = append(p.Refused, lines(p.Memory.Check())...)
	}
	counts := dataLines(p.Data, cfg)
	if found == nil && refusal == nil && path != "" {
		counts = []string{"data: not counted yet; the first run encodes it"}
	}
	if err := o.write(path, cfg, p, counts); err != nil {
		return 0, err
	}
	for _, w := range cfg.Warnings {
		fmt.Fprintln(o.Stderr, "warning: "+w.String())
	}
	if len(o.Assume) == 0 && refusal != nil { // as the run would end
		return 0, &InputError{refusal}
	}
	if o.JSON {
		for _, line := range p.Refused {
			fmt.Fprintln(o.Stderr, "cannot run as it is: "+line)
		}
	}
	return 0, nil
}

// dataLines returns lines with the amount of data and the ignored keys; none if the data is unknown.
func dataLines(d *plan.Data, cfg *config.Config) []string {
	if d == nil {
		return nil
	}
	count := readable.Counted[int64]
	documents := "documents not counted yet"
	if d.Documents != nil {
		documents = count(*d.Documents, "document")
	}
	filled := ""
	if room := d.Samples * int64(cfg.Data.SeqLen); d.SampleTokens < room {
		filled = fmt.Sprintf(" (%.1f %% filled)", 100*float64(d.SampleTokens)/float64(room))
	}
	lines := []string{
		fmt.Sprintf("data: %s, %s, %s", count(d.Files, "file"), documents, count(d.Tokens, "token")),
		fmt.Sprintf("samples: %s of %s%s, %s; an epoch is %s", readable.Count(d.Samples),
			count(int64(cfg.Data.SeqLen), "token"), filled, count(d.Targets, "target"), count(d.StepsPerEpoch, "step")),
	}
	if d.DroppedDocuments > 0 {
		lines[0] += "; " + count(d.DroppedDocuments, "document") + " dropped"
		lines = append(lines, "documents by data.seq_len: "+kept(d.Retention))
	}
	if len(d.Ignored) > 0 {
		lines = append(lines, "data: "+unread(d.Ignored))
	}
	for _, w := range d.Warnings {
		if !strings.HasPrefix(w, data.FormNote) {
			w = "warning: " + w
		}
		lines = append(lines, "data: "+w)
	}
	return lines
}

// kept words the shares of documents that fit: "32K keeps 30 %, 64K 92.5 %".
func kept(list []data.Share) string {
	var words []string
	keeps := "keeps "
	for _, s := range list {
		share := math.Floor(1000*s.Kept) / 10 // 100 % only if all are kept
		words = append(words, fmt.Sprintf("%s %s%g %%", readable.Size(int64(s.SeqLen)),
			keeps, share))
		keeps = ""
	}
	return strings.Join(words, ", ")
}

func unread(keys []string) string {
	return "ignored keys of the records, which change nothing: " + strings.Join(keys, ", ")
}

// maxPlanned bounds the ranks that share a sequence: the plan lists a hop for every pair of them.
const maxPlanned = 1024

// maxExchanged bounds the ranks that exchange heads: each of them exchanges with every other in every layer.
const maxExchanged = 256

// loadPlanned loads a config for a plan. It refuses more than maxPlanned ranks before the slow choice of a strategy.
func loadPlanned(path string, o config.Options) (*config.Config, error) {
	decide := o.Decide
	o.Decide = nil
	cfg, err := config.Load(path, o)
	if err != nil {
		return nil, err
	}
	if n := cfg.Parallel.Context; n > maxPlanned {
		return nil, cfg.Fault("parallel.context", fmt.Errorf("%d ranks share a sequence, and cprun plans at most %d; "+
			"lower it, or raise parallel.data", n, maxPlanned))
	}
	if n := ring.UlyssesDegree(cfg.Parallel.Algorithm, cfg.Parallel.Context, cfg.Parallel.Inner); n > maxExchanged {
		return nil, cfg.Fault("parallel.algorithm", fmt.Errorf("%d ranks exchange heads, and cprun plans at most %d; "+
			"write hierarchical with parallel.ulysses_degree, or ring", n, maxExchanged))
	}
	o.Decide = decide
	return config.Load(path, o)
}

func (o *PlanOptions) write(path string, cfg *config.Config, p *plan.Plan, counts []string) error {
	if o.JSON {
		return printJSON(o.Stdout, p)
	}
	if err := p.Summary(o.Stdout, terminal.Columns(), counts); err != nil {
		return err
	}
	if !o.Verbose {
		_, err := fmt.Fprintln(o.Stdout, "more: --verbose (config, partition, hops, other backends)")
		return err
	}
	fmt.Fprintf(o.Stdout, "\nconfig      %s with its autos resolved\n", terminal.Name(cmp.Or(path, o.Model)))
	for line := range strings.Lines(string(cfg.YAML())) {
		fmt.Fprint(o.Stdout, "  ", line)
	}
	return p.Details(o.Stdout, terminal.Columns())
}

// refusal returns the faults in the files named by the config, and the amount of data. Faults stop a run, but not a
// plan: data counts without weights too.
func (o *PlanOptions) refusal(path string, planned *config.Config, ranks int, m machine.Machine) (*plan.Data, error) {
	whole, err := config.Load(path, config.Options{Set: o.Set, Ranks: ranks, Hosts: m.Hosts, Device: m.Device(),
		Known: true})
	if err != nil {
		found, _ := train.Check(planned)
		return found, err
	}
	return train.Check(whole)
}

func lines(err error) []string {
	if err == nil {
		return nil
	}
	return strings.Split(err.Error(), "\n")
}

func (o *Options) costs(m machine.Machine) plan.Costs {
	c := o.table(m)
	if !c.Exact && m.IsCPU() && c.Table != nil && c.Table.CoreGFLOPs > 0 {
		c.Rate = matmulRate() / c.Table.CoreGFLOPs
	}
	return c
}

// table returns the table measured here, else that of the most similar reference machine. It warns about a broken
// table, and plans without one.
func (o *Options) table(m machine.Machine) plan.Costs {
	of, c := costMachine(m), plan.Costs{Cores: coresOf(m)}
	var err error
	if c.Table, err = cost.Own(of); c.Table != nil {
		c.Exact = true
	} else if err == nil {
		c.Table, c.Exact, err = cost.Reference(of)
	}
	if err != nil {
		fmt.Fprintln(o.Stderr, "warning: no estimate of time: "+terminal.Text(err.Error()))
	}
	return c
}

// where returns the machine to plan for and its ranks. The limits of this machine do not apply.
func (o *PlanOptions) where() (m machine.Machine, ranks int, err error) {
	if m, err = machine.Assume(o.Assume); err != nil {
		return m, 0, &InputError{err}
	}
	if len(o.Assume) == 0 && machine.Built && o.Device != "cpu" {
		if m, err = found(o.Device); err != nil {
			return m, 0, err
		}
	}
	if len(o.Assume) == 0 && m.IsCPU() {
		m = onCPU()
	}
	switch device := o.Device; {
	case device == "cuda" && m.IsCPU():
		return m, 0, inputf("--device cuda: this binary finds no GPU here; name one to plan for, such as --assume " +
			"gpu=h200")
	case device == "cpu" && !m.IsCPU():
		return m, 0, inputf("--device cpu contradicts --assume arch=sm%d; leave one of the two out", m.Arch)
	case device == "cuda":
	case device != "auto" && device != "cpu":
		return m, 0, inputf("--device %q: want auto, cpu or cuda", device)
	}
	if err := launch.CheckLimits(); err != nil {
		return m, 0, err
	}
	nproc := o.NProc
	switch {
	case nproc != "auto":
		if ranks, err = Processes(nproc); err == nil && m.Assumed && m.GPUs > 0 && ranks > m.GPUs {
			err = inputf("--nproc %d: one process runs on each GPU, and --assume has gpus=%d; leave --nproc out, or "+
				"assume more GPUs", ranks, m.GPUs)
		}
		return m, ranks * max(1, m.Hosts), err
	case m.GPUs > 0:
		return m, m.GPUs * max(1, m.Hosts), nil
	}
	return m, max(1, m.Hosts), nil
}

// matmulRate returns the peak GFLOP/s of one thread's matrix product, to scale a table to a CPU without its own.
var matmulRate = sync.OnceValue(func() float64 { return cpu.ProductRate(128, 5*time.Millisecond) })

// A Site is a machine, with its costs, that quick plans are for.
type Site struct {
	machine.Machine
	costs    plan.Costs
	options  *PlanOptions
	planOnly bool
}

// Site returns the machine of a device: this one, or with planOnly also an assumed one.
func (o Options) Site(device string, assume []string, planOnly bool) (at Site, err error) {
	at.options, at.planOnly = &PlanOptions{Options: o, Assume: assume}, planOnly
	at.options.Device, at.options.NProc = device, "auto"
	if planOnly {
		at.Machine, _, err = at.options.where()
	} else {
		_, err = at.options.resolve()
		at.Machine = at.options.machine
	}
	if err == nil {
		at.costs = o.costs(at.Machine)
	}
	return at, err
}

// Plan plans a config on all ranks. Unless it only plans, it also checks the data as a run does.
func (at *Site) Plan(path string, ranks int, set []string) (*config.Config, *plan.Plan, error) {
	load := loadPlanned
	if !at.planOnly {
		load = func(path string, o config.Options) (*config.Config, error) {
			cfg, err := config.Load(path, o)
			if err == nil {
				_, err = train.Check(cfg)
			}
			return cfg, err
		}
	}
	d, err := at.options.decider(at.Machine)
	if err != nil {
		return nil, nil, err
	}
	return quick(load, path, d, ranks, at.costs, config.Options{Set: set, NoFiles: at.planOnly})
}

// quick plans without hops and advice. It chooses as a run does, by the decisions of d.
func quick(
	load func(string, config.Options) (*config.Config, error), path string, d *plan.Decider, ranks int,
	costs plan.Costs, opts config.Options,
) (*config.Config, *plan.Plan, error) {
	m := d.Machine
	opts.Ranks, opts.Hosts, opts.Device = ranks, m.Hosts, m.Device()
	if opts.Decide == nil {
		opts.Decide = d.Decide
	}
	cfg, err := load(path, opts)
	if err != nil {
		return nil, nil, err
	}
	choice, err := choose(cfg, m)
	if err != nil {
		return nil, nil, err
	}
	p, err := plan.Make(cfg, ranks, plan.Options{
		Machine: m, Choice: choice.Choice, Costs: costs, Chosen: d.Chosen, Quick: true,
	})
	return cfg, p, err
}
