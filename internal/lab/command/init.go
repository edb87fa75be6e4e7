package command

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/bits"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/run/train"
	"github.com/cprun/cprun/internal/text/data"
)

// InitOptions are the flags of `cprun init`.
type InitOptions struct {
	Options
	To     string // file to write; "": standard output
	Assume string // a GPU, or as in cprun plan; "": this machine
	Args   []string
}

// Schema prints the JSON schema of train.yaml.
func Schema(w io.Writer) error { return printJSON(w, config.Schema()) }

// These are the aims of a first config.
const (
	leastLen   = 64        // tokens of a sample
	unknownLen = 32 << 10  // the same if the data is not counted
	stepTokens = 256 << 10 // tokens of a step, at most
	mostBatch  = 64        // samples of a step
	leastSteps = 20        // of an epoch, with shorter samples or fewer of them in a step
	leastKept  = 0.99      // share of conversations that a sample holds
	manyParams = 4e9       // with more, the learning rate is lower
)

// A draft is a train.yaml in the making.
type draft struct {
	model, data string
	site        Site
	ranks       int
	set         []string // the keys so far

	cfg     *config.Config
	plan    *plan.Plan
	counts  *plan.Data // nil: not counted
	refused error      // why a run would not begin
	whyLen  string     // the reason of data.seq_len
	bound   string     // the memory that full training exceeds; "": it fits
	mean    int64      // tokens of a document that is packed; 0: none is
	batch   int
	epochs  int
}

// Init writes a train.yaml for a model directory or Hub id, and for data, which may be "".
func Init(model, path string, o InitOptions) (int, error) {
	defer debug.SetGCPercent(debug.SetGCPercent(planGC))
	p := PlanOptions{Options: o.Options}
	if o.Assume != "" {
		if o.NProc != "auto" {
			o.Assume += ",gpus=" + o.NProc
		}
		p.Assume = []string{o.Assume}
	}
	_, ranks, err := p.where()
	if err != nil {
		return 0, inputf("%s", strings.ReplaceAll(err.Error(), "--nproc", "--gpus"))
	}
	d := &draft{model: model, data: path, ranks: ranks, set: []string{"model.from=" + model}}
	if path != "" {
		d.set = append(d.set, "data.path="+path)
	}
	if d.site, err = o.Site(o.Device, p.Assume, true); err != nil {
		return 0, err
	}
	plain := strings.NewReplacer("--set model.from="+model+": ", "", "--set data.path="+path+": ", "").Replace
	if err := d.choose(); err != nil {
		return 0, inputf("%s", plain(err.Error()))
	}
	next := strings.Join(d.next(o.Args[0], cmp.Or(o.To, "train.yaml"), o.Assume), "\n#   ")
	text := fmt.Sprintf("%s# next:\n#   %s\n\n%s", commented("", d.plan.Verdict()), next, d.text())
	if o.To == "" {
		_, err = io.WriteString(o.Stdout, text)
	} else if err = writeNew(o.To, text); err == nil {
		head, _, _ := strings.Cut(text, "\n\n")
		_, err = fmt.Fprintf(o.Stdout, "wrote %s\n%s\n", terminal.Name(o.To), strings.ReplaceAll("\n"+head, "\n# ", "\n")[1:])
	}
	for _, line := range lines(d.refused) {
		fmt.Fprintln(o.Stderr, "cprun: before it trains: "+terminal.Text(plain(line)))
	}
	return 0, err
}

func writeNew(path, text string) error {
	dir, err := files.OpenDir(filepath.Dir(path))
	if err == nil {
		defer dir.Close()
		err = files.Exclusive(dir, filepath.Base(path), []byte(text))
	}
	if errors.Is(err, fs.ErrExist) {
		err = errors.New("the file exists; name another, or remove it")
	}
	if err != nil {
		return inputf("--to %s: %w", terminal.Name(path), err)
	}
	return nil
}

// with returns the keys with a length of samples, and others.
func (d *draft) with(length int, more ...string) []string {
	return append(append(slices.Clone(d.set), fmt.Sprintf("data.seq_len=%d", length)), more...)
}

// count counts the data for a length of samples. The error is a fault of the config.
func (d *draft) count(length int) (err error) {
	d.cfg, err = config.Load("", config.Options{Set: d.with(length), NoFiles: d.data == "", Known: true})
	if err == nil && d.data != "" {
		d.counts, d.refused = train.Check(d.cfg)
	}
	return err
}

// chats reports whether the records are never cut.
func (d *draft) chats() bool { return d.data != "" && data.Conversation(d.cfg.Data.Path[0].Kind) }

// choose sets all keys, for the longest useful samples that fit.
func (d *draft) choose() error {
	for _, n := range []int{4 << 10, 32 << 10, 256 << 10, leastLen} { // a sample may be longer than the data
		if err := d.count(n); err != nil {
			return err
		}
		if d.counts != nil || d.refused == nil {
			break
		}
	}
	length, least, keys := d.length(), max(leastLen, 2*d.ranks), d.set
	fits, err := d.fits(length)
	if !fits {
		if fits, err = d.fits(least); !fits { // the search would be long
			return err
		}
		fits, d.set = false, keys
	}
	for ; !fits && length > least; fits, err = d.fits(length) {
		length, d.whyLen = max(length/2, least), "; twice as many do not fit"
	}
	if !fits {
		return err
	}
	if c := d.counts; c != nil && c.Documents != nil && !d.chats() && c.Tokens < *c.Documents*int64(length)/2 {
		d.mean = c.Tokens / *c.Documents
		d.set = append(d.set, "data.pack_documents=true")
	}
	if err := d.count(length); err != nil {
		return err
	}
	if d.epochs = 1; d.chats() {
		d.epochs = 2
	}
	steps := fmt.Sprintf("train.epochs=%d", d.epochs)
	d.batch = min(mostBatch, stepTokens/length)
	if c := d.counts; c != nil {
		d.batch = min(d.batch, int(c.Samples/leastSteps))
		steps = fmt.Sprintf("train.samples=%d", c.EpochSamples*int64(d.epochs))
		if share := append(c.Retention, data.Share{Kept: 1})[0].Kept; d.chats() {
			d.whyLen += fmt.Sprintf("; holds %.4g %% of the conversations", 100*share)
		}
	}
	d.batch = 1 << max(0, bits.Len(uint(d.batch))-1)
	d.cfg, d.plan, err = d.site.Plan("", d.ranks,
		d.with(length, fmt.Sprintf("train.global_batch_size=%d", d.batch), steps))
	return err
}

// length returns the tokens of a sample: nearly all conversations fit into one. For other data it is the length of the
// model, or less if an epoch would have few samples.
func (d *draft) length() int {
	most, n := d.cfg.Model.MaxPositionEmbedding, d.cfg.Data.SeqLen
	switch {
	case d.counts == nil:
		n, d.whyLen = unknownLen, "; as the data is not counted"
	case d.chats():
		for _, r := range d.counts.Retention {
			if n = r.SeqLen; r.Kept >= leastKept {
				break
			}
		}
	default:
		d.whyLen = ": the positions of the model"
		for n = most; n > leastLen && d.counts.Tokens/int64(n) < leastSteps; n /= 2 {
			d.whyLen = "; longer ones would be few"
		}
	}
	return 1 << (bits.Len(uint(min(n, most))) - 1)
}

// fits reports whether the run fits with a length. It adds adapters if the run needs them to fit. err names the lack.
func (d *draft) fits(length int) (ok bool, err error) {
	whole := d.set
	d.bound = ""
	for _, lora := range []string{"lora=null", "lora={r: 16}"} {
		d.set = append(slices.Clone(whole), lora)
		if _, d.plan, err = d.site.Plan("", d.ranks, d.with(length)); err != nil {
			return false, err
		}
		if err = d.plan.Memory.Check(); d.plan.Memory.Fits {
			return true, nil
		}
		d.bound = d.plan.Memory.Bound(d.site.Machine, d.ranks)
	}
	d.set = whole
	return false, err
}

// commented returns a line of YAML with a comment, which is above a long line, in at most 80 columns.
func commented(line, why string) string {
	const at = 30
	indent, above := strings.Repeat(" ", at), len(line) > at-2 || line == ""
	if above {
		indent = line[:len(line)-len(strings.TrimLeft(line, " "))]
	}
	comment := ""
	for part := range strings.Lines(terminal.Wrap(why, 78-len(indent), 0)) {
		comment += indent + "# " + strings.TrimSpace(part) + "\n"
	}
	switch {
	case line == "":
		return comment
	case above:
		return comment + line + "\n"
	}
	return line + comment[len(line):]
}

// text returns the config. The comment of each key is its reason.
func (d *draft) text() string {
	e, m, length := &d.plan.Estimate, &d.cfg.Model, d.cfg.Data.SeqLen
	size := e.Parameters
	if d.bound != "" { // without the adapters
		size -= e.Trained
	}
	text := "model:\n" + commented("  from: "+strconv.Quote(d.model), fmt.Sprintf("%s, %s parameters, %s positions",
		m.Architecture, readable.Short(float64(size)), readable.Count(int64(m.MaxPositionEmbedding))))
	key := func(line, why string, args ...any) { text += commented(line, fmt.Sprintf(why, args...)) }
	if m.Family().Balances() && d.bound == "" {
		key("  output_router_logits: true", "balances the experts, since all weights train")
		key("  router_aux_loss_coef: 0.001", "the factor of that loss, as in Qwen3's")
	}
	text += "data:\n"
	about := "your files: text, .jsonl, .parquet, or a directory of datasets"
	if d.data != "" {
		about = d.cfg.Data.Path[0].Kind
	}
	if d.counts != nil {
		about += ": " + strings.TrimPrefix(dataLines(d.counts, d.cfg)[0], "data: ")
	}
	key("  path: "+strconv.Quote(cmp.Or(d.data, "data.jsonl")), "%s", about)
	key("  seq_len: "+readable.Size(int64(length)), "tokens of a sample%s", d.whyLen)
	if d.mean > 0 {
		key("  pack_documents: true", "attention stays inside a document, of %d tokens in the mean", d.mean)
	}
	key("  # validation: {path: held-out.jsonl, every: 50, samples: 8}", "for the loss on data that is not trained on")
	text += "train:\n"
	passes := "passes over the data"
	if e.Steps > 0 {
		passes += ": " + readable.Counted(e.Steps, "step")
	}
	key(fmt.Sprintf("  epochs: %d", d.epochs), "%s", passes)
	key(fmt.Sprintf("  global_batch_size: %d", d.batch), "samples of a step: %s",
		readable.Counted(d.batch*length, "token"))
	rate, whose := "2.0e-5", "all weights; adapters take 10 times as much"
	switch {
	case d.bound != "":
		rate, whose = "2.0e-4", "adapters; all weights take a tenth"
		key("lora: {r: 16}", "full training lacks %s", d.bound)
	case size > manyParams:
		rate = "1.0e-5"
		fallthrough
	default:
		key("# lora: {r: 16}", "all weights train, since that fits; adapters take less memory")
	}
	key("optimizer: {lr: "+rate+"}", "for %s", whose)
	key("lr_schedule: {warmup_ratio: 0.03}", "a short rise, then a cosine to a tenth")
	return text
}

// next returns the commands to go on with.
func (d *draft) next(program, file, assume string) []string {
	ranks, planned := []string{"--nproc", strconv.Itoa(d.ranks / max(1, d.site.Hosts))}, []string{"--assume", assume}
	if assume == "" {
		planned = ranks
	}
	model, _ := filepath.Abs(d.model) // which may be "."
	run := []string{program, file, "--run-dir", filepath.Join("runs", filepath.Base(model))}
	if d.site.Hosts > 1 {
		run = append([]string{"srun"}, run...)
	}
	plan, verify := []string{program, "plan", file}, []string{program, "verify", file}
	if d.ranks > 1 { // else verify chooses 2
		verify = append(verify, ranks...)
	}
	return []string{Shell(append(plan, planned...)), Shell(verify), Shell(append(run, ranks...))}
}
