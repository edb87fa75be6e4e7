package launch

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/term"

	"github.com/cprun/cprun/internal/base/cores"
	"github.com/cprun/cprun/internal/launch/place"
)

// Environment variables that the launcher reads, or sets for its workers. The first five have the names of torchrun,
// for scripts and libraries that read them.
const (
	envRank           = "RANK"
	envWorldSize      = "WORLD_SIZE"
	envLocalRank      = "LOCAL_RANK"
	envLocalWorldSize = "LOCAL_WORLD_SIZE"
	envNodeRank       = "NODE_RANK"
	envRunID          = "CPRUN_RUN_ID"
	envRestartCount   = "CPRUN_RESTART_COUNT"
	envMaxProcs       = "GOMAXPROCS"
	envRuntimeDir     = "XDG_RUNTIME_DIR"
	envTempDir        = "TMPDIR"
	envTerm           = "TERM"
	envVisible        = "CUDA_VISIBLE_DEVICES"
	envMulticast      = "NCCL_NVLS_ENABLE"
	envLaunchOrder    = "NCCL_LAUNCH_ORDER_IMPLICIT"
	envNCCLNetwork    = "NCCL_SOCKET_IFNAME"
	envNCCLFamily     = "NCCL_SOCKET_FAMILY"
	envQueues         = "CUDA_DEVICE_MAX_CONNECTIONS"
	envCacheDir       = "XDG_CACHE_HOME"
	envHubCache       = "HF_HUB_CACHE"
	envHubHome        = "HF_HOME"
	envTied           = "CPRUN_TIED"
	envSlurmCPUs      = "SLURM_CPUS_ON_NODE"
)

// Variable is an environment variable that cprun reads.
type Variable struct {
	Name    string
	Value   string // "" if not Set
	Set     bool
	Meaning string // one line, for cprun doctor

	changes bool // affects results or speed, so that a run prints it at the start
}

// EnvKeyFile names the key file of a job of several nodes.
const EnvKeyFile = "CPRUN_KEY_FILE"

// EnvCPU selects the instruction set of the CPU kernels.
const EnvCPU = "CPRUN_CPU"

// EnvHostID distinguishes hosts for NCCL and cprun if the system does not.
const EnvHostID = "NCCL_HOSTID"

// Getenv returns an environment variable that Environment lists.
func Getenv(name string) string { return os.Getenv(name) }

// Environment lists every variable that cprun reads, set or not.
func Environment() []Variable {
	vars := []Variable{
		{Name: envMaxProcs, changes: true, Meaning: "threads of one worker that compute at the same time; default: " +
			"the cores of this node divided by its processes, at least 2, or 1 for a rank on a CPU that shares a " +
			"core; if set, no rank is pinned to a core"},
		{Name: EnvCPU, changes: true, Meaning: "instructions of the CPU kernels: generic (plain Go), avx2 or avx512; " +
			"default: the best of this machine"},
		{Name: "GOMEMLIMIT", changes: true, Meaning: "soft limit on a worker's memory, read by the Go runtime"},
		{Name: "GOTRACEBACK", Meaning: "how much a crashing worker prints, read by the Go runtime"},
		{Name: envRuntimeDir, Meaning: "folder for the private directory of a job, if it is a short path to a " +
			"private directory of this user"},
		{Name: envTempDir, Meaning: "folder for it otherwise; default /tmp"},
		{Name: envTerm, Meaning: "dumb: plain progress lines even on a terminal"},
		{Name: "NO_COLOR", Meaning: "if set, cprun top uses no colours"},
		{Name: "COLORTERM", Meaning: "with TERM: the number of colours of cprun top"},
		{Name: "LC_ALL", Meaning: "whether cprun top may use characters beyond ASCII"},
		{Name: "LC_CTYPE", Meaning: "the same if LC_ALL is not set"},
		{Name: "LANG", Meaning: "the same if neither is set"},
		{Name: envVisible, changes: true, Meaning: "the GPUs to use, in order; read by the CUDA driver"},
		{Name: envMulticast, changes: true, Meaning: "NCCL's use of NVLink multicast; cprun sets 0 for its workers " +
			"if it is not set"},
		{Name: envLaunchOrder, changes: true, Meaning: "1: kernels of several NCCL communicators start in the order " +
			"of the calls; a worker sets 1 before it loads NCCL if it is not set"},
		{Name: envQueues, changes: true, Meaning: "queues between a process and its GPU; cprun sets 32 for its " +
			"workers if it is not set"},
		{Name: envNCCLNetwork, changes: true, Meaning: "NCCL's network interface between hosts; in a job of several, " +
			"cprun sets that of --interface, or the one towards the rendezvous, if it is not set"},
		{Name: envNCCLFamily, changes: true, Meaning: "IPv4 or IPv6 there; set together with it"},
		{Name: EnvHostID, changes: true, Meaning: "agents with different values count as different hosts; also read " +
			"by NCCL"},
		{Name: envFlashAttn, changes: true, Meaning: "0: attention.backend flash is not chosen; 1 is the default"},
		{Name: envFusedAttn, changes: true, Meaning: "0: attention.backend fused (cuDNN) is not chosen; 1 is the default"},
		{Name: envDebug, changes: true, Meaning: "1: NVTE_DEBUG_LEVEL has an effect"},
		{Name: envDebugLevel, changes: true, Meaning: "with NVTE_DEBUG=1: least detail about the choice of a backend, as " +
			"attention.debug 0, 1 or 2"},
		{Name: envCacheDir, Meaning: "folder of cprun/kernels with compiled GPU kernels; default ~/.cache"},
		{Name: envHubCache, Meaning: "cache in which a Hub id is looked up; default: hub in HF_HOME"},
		{Name: envHubHome, Meaning: "default: huggingface in XDG_CACHE_HOME or ~/.cache"},
		{Name: EnvKeyFile, Meaning: "file with the secret of a job of several nodes; no other user may read it; " +
			"default: .key in the run directory"},
		{Name: envSlurmCPUs, Meaning: "cores of Slurm's step on this node, for a warning if its ranks share them"},
		{Name: envRunID, Meaning: "set by cprun for its workers: their job"},
		{Name: envTied,
			Meaning: "set by cprun scale, except on Linux: a run ends at the end of its standard input"},
	}
	for _, v := range place.VariableList() {
		if v.Name != envVisible { // which has other meanings too
			vars = append(vars, Variable{Name: v.Name, Meaning: v.Meaning})
		}
	}
	for i := range vars {
		vars[i].Value, vars[i].Set = os.LookupEnv(vars[i].Name)
	}
	return vars
}

// Hostname returns the name of this host; localhost if it has none.
func Hostname() string {
	host, _ := os.Hostname()
	return cmp.Or(host, "localhost")
}

// Terminal reports whether f is a terminal that can redraw a line in place.
func Terminal(f *os.File) bool {
	return term.IsTerminal(int(f.Fd())) && os.Getenv(envTerm) != "dumb"
}

// workerEnv returns the environment of one worker: the launcher's, with the worker's ranks, and values for libraries
// unless the user has set them. It contains no secret.
func workerEnv(base []string, h hello) []string {
	env := map[string]string{}
	for _, v := range base {
		name, value, _ := strings.Cut(v, "=")
		env[name] = value
	}
	for name, n := range map[string]int{envRank: h.Rank, envWorldSize: h.WorldSize, envLocalRank: h.LocalRank,
		envLocalWorldSize: h.LocalWorldSize, envNodeRank: h.NodeRank, envRestartCount: h.Restart} {
		env[name] = strconv.Itoa(n)
	}
	env[envRunID] = h.RunID
	unlessSet := func(name, value string) { env[name] = cmp.Or(env[name], value) }
	// Multicast objects are a resource of the whole fabric, and every communicator makes new ones. If it cannot, NCCL's
	// initialization fails instead of continuing without them.
	unlessSet(envMulticast, "0")
	// A worker has more streams than the driver's 8 queues. A stream that waits for another device blocks all streams of
	// its queue.
	unlessSet(envQueues, "32")
	// Otherwise each worker would start a thread for each core of the node. At least two, so that transfers overlap with
	// kernels: with one thread, a transfer starts only after the kernel.
	unlessSet(envMaxProcs, strconv.Itoa(max(2, runtime.GOMAXPROCS(0)/h.ranksSharingCores())))
	if h.Interface != "" && env[envNCCLNetwork] == "" {
		// By default NCCL uses the first interface by name, which may not reach the other hosts.
		env[envNCCLNetwork] = "=" + h.Interface
		family := "AF_INET"
		if strings.Contains(h.Listen, ":") {
			family = "AF_INET6"
		}
		unlessSet(envNCCLFamily, family)
	}
	var list []string
	for _, name := range slices.Sorted(maps.Keys(env)) {
		list = append(list, name+"="+env[name])
	}
	return list
}

// ranksSharingCores counts the ranks that share the launcher's cores: its own workers, or all ranks of this host if a
// batch system started one launcher per rank and bound none of them to cores.
func (h *hello) ranksSharingCores() int {
	if h.Rank >= len(h.Hosts) || runtime.NumCPU() < cores.Online() {
		return h.LocalWorldSize
	}
	n := 0
	for _, host := range h.Hosts {
		if host == h.Hosts[h.Rank] {
			n++
		}
	}
	return n
}

// runtimeBases lists the folders for a job's private directory, the best first.
func runtimeBases() []string {
	bases := []string{os.TempDir(), "/tmp"}
	if dir := os.Getenv(envRuntimeDir); ownedPrivate(dir) {
		bases = append([]string{dir}, bases...)
	}
	return slices.Compact(bases)
}

// program returns the path of this program for starting it again. If the file was replaced during the job, the kernel
// still has the old one.
func program() (string, error) {
	path, err := os.Executable()
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(path); err != nil {
		return "/proc/self/exe", nil
	}
	return path, nil
}

// Variables of TransformerEngine that users of context parallelism have in their scripts, with the same meaning. They
// are integers; any value except 0 is true. A product of the last two other than 0 or 1 is the highest level.
const (
	envFlashAttn  = "NVTE_FLASH_ATTN"
	envFusedAttn  = "NVTE_FUSED_ATTN"
	envDebug      = "NVTE_DEBUG"
	envDebugLevel = "NVTE_DEBUG_LEVEL"
)

// AttentionEnv is the environment's restriction of attention backends.
type AttentionEnv struct {
	NoFlash, NoFused bool
	Debug            int // NVTE_DEBUG times NVTE_DEBUG_LEVEL: 0, 1 or 2
}

// Attention reads the variables for the choice of a backend. The error names every variable with an invalid value.
func Attention() (AttentionEnv, error) { return attentionEnv(os.LookupEnv) }

func attentionEnv(lookup func(string) (string, bool)) (e AttentionEnv, err error) {
	var faults []error
	read := func(name string, n int64) int64 { // n is the default, as in TransformerEngine
		if text, ok := lookup(name); ok {
			var err error
			if n, err = strconv.ParseInt(text, 10, 32); err != nil {
				faults = append(faults, fmt.Errorf("environment: %s=%.60q: want an integer such as 0 or 1, or unset %s",
					name, text, name))
			}
		}
		return n
	}
	e.NoFlash, e.NoFused = read(envFlashAttn, 1) == 0, read(envFusedAttn, 1) == 0
	if e.Debug = int(read(envDebug, 0) * read(envDebugLevel, 0)); e.Debug != 0 && e.Debug != 1 {
		e.Debug = 2
	}
	return e, errors.Join(faults...)
}

// HubCache returns the cache of huggingface_hub.
func HubCache() string {
	home, _ := os.UserHomeDir()
	cache := cmp.Or(os.Getenv(envCacheDir), filepath.Join(home, ".cache"))
	return cmp.Or(os.Getenv(envHubCache), filepath.Join(cmp.Or(os.Getenv(envHubHome),
		filepath.Join(cache, "huggingface")), "hub"))
}

// Honoured returns one line with the set variables that affect a run, or "".
func Honoured() string {
	var set []string
	for _, v := range Environment() {
		if v.Set && v.changes {
			set = append(set, v.Name+"="+quoteUnusual(v.Value))
		}
	}
	if len(set) == 0 {
		return ""
	}
	return "environment: " + strings.Join(set, " ")
}

func quoteUnusual(s string) string {
	if q := fmt.Sprintf("%.80q", s); q != `"`+s+`"` || strings.Contains(s, " ") {
		return q
	}
	return s
}
