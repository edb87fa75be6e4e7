package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// A mutant is one change of one file.
type mutant struct {
	file       string // absolute
	line       int
	start, end int    // the replaced bytes
	text       string // their replacement
	what       string
}

// mutateSource runs mutants of each package, and returns an error if any survives.
func mutateSource(o options, packages []string) error {
	tmp, err := os.MkdirTemp("", "mutate-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	survived := 0
	for _, path := range packages {
		n, err := mutatePackage(o, path, tmp)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		survived += n
	}
	if survived > 0 {
		return fmt.Errorf("%d survived", survived)
	}
	return nil
}

func mutatePackage(o options, path, tmp string) (survived int, err error) {
	out, err := exec.Command("go", "list", "-f", "{{$d := .Dir}}{{range .GoFiles}}{{$d}}/{{.}}\n{{end}}", path).Output()
	if err != nil {
		return 0, fmt.Errorf("go list: %w", err)
	}
	files := strings.Fields(string(out))
	if len(files) == 0 {
		return 0, errors.New("no Go files")
	}
	t := tests{options: o, path: path, dir: filepath.Dir(files[0]), tmp: tmp, sources: map[string][]byte{}}
	begun := time.Now()
	if built, said := t.build(nil); !built {
		return 0, fmt.Errorf("the unchanged tests do not compile:\n%s", said)
	}
	built := time.Now()
	if passed, said := t.pass(time.Hour); !passed {
		return 0, fmt.Errorf("the unchanged tests fail:\n%s", said)
	}
	limit := o.timeout
	if limit == 0 {
		limit = 10*time.Second + 3*time.Since(built)
	}
	var all []mutant
	for _, f := range files {
		if t.sources[f], err = os.ReadFile(f); err != nil {
			return 0, err
		}
		found, err := mutantsOf(f, t.sources[f])
		if err != nil {
			return 0, err
		}
		for _, m := range found {
			if strings.Contains(m.place(), o.only) {
				all = append(all, m)
			}
		}
	}
	rand.New(rand.NewPCG(o.seed, 0)).Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	tried := 0
	for i := range all {
		if tried == o.n {
			break
		}
		if built, _ := t.build(&all[i]); !built {
			continue // for example an unused variable
		}
		tried++
		if passed, _ := t.pass(limit); passed {
			survived++
			fmt.Printf("survived: %s\n", all[i].place())
		} else if o.verbose {
			fmt.Printf("noticed: %s\n", all[i].place())
		}
	}
	fmt.Printf("%s: %d of %d mutants tried, %d survived (%.0f s)\n", path, tried, len(all), survived,
		time.Since(begun).Seconds())
	return survived, nil
}

// place describes a mutant to people: file:line and the change.
func (m *mutant) place() string {
	name := m.file
	if dir, err := os.Getwd(); err == nil {
		if rel, err := filepath.Rel(dir, m.file); err == nil {
			name = rel
		}
	}
	return fmt.Sprintf("%s:%d: %s", name, m.line, m.what)
}

// tests holds the compiled tests of one package.
type tests struct {
	options
	path, dir, tmp string
	sources        map[string][]byte
}

func (t *tests) binary() string { return filepath.Join(t.tmp, "package.test") }

// build compiles the tests with a mutant, or if m is nil, without one.
func (t *tests) build(m *mutant) (built bool, said []byte) {
	overlay := struct{ Replace map[string]string }{map[string]string{}}
	if m != nil {
		src := t.sources[m.file]
		changed := filepath.Join(t.tmp, "changed.go")
		text := append(append(bytes.Clone(src[:m.start]), m.text...), src[m.end:]...)
		if err := os.WriteFile(changed, text, 0o600); err != nil {
			return false, []byte(err.Error())
		}
		overlay.Replace[m.file] = changed
	}
	list := filepath.Join(t.tmp, "overlay.json")
	text, err := json.Marshal(overlay)
	if err == nil {
		err = os.WriteFile(list, text, 0o600)
	}
	if err != nil {
		return false, []byte(err.Error())
	}
	said, err = exec.Command("go", "test", "-c", "-vet=off", "-p=1", "-overlay="+list, "-o="+t.binary(),
		t.path).CombinedOutput()
	return err == nil, said
}

// pass runs the compiled tests, and kills all processes that they leave.
func (t *tests) pass(limit time.Duration) (passed bool, said []byte) {
	c := exec.Command(t.binary(), "-test.short", "-test.failfast", "-test.timeout="+limit.String(), "-test.run="+t.run,
		"-test.skip="+t.skip)
	c.Dir = t.dir
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.WaitDelay = time.Second
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	if err := c.Start(); err != nil {
		return false, []byte(err.Error())
	}
	end := time.AfterFunc(limit+5*time.Second, func() { _ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL) })
	err := c.Wait()
	end.Stop()
	_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL)
	return err == nil, out.Bytes()
}

// mutantsOf lists the mutants of a file.
func mutantsOf(path string, src []byte) (all []mutant, err error) {
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, path, src, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	at := func(p token.Pos) int { return set.Position(p).Offset }
	text := func(n ast.Node) string { return string(src[at(n.Pos()):at(n.End())]) }
	add := func(n ast.Node, text, what string) {
		all = append(all, mutant{path, set.Position(n.Pos()).Line, at(n.Pos()), at(n.End()), text, what})
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.IfStmt:
			cond := text(n.Cond)
			if leaves(n.Body) && n.Else == nil {
				add(n.Cond, "false && ("+cond+")", "never: if "+brief(cond))
			}
			add(n.Cond, "!("+cond+")", "negated: if "+brief(cond))
		case *ast.BinaryExpr:
			if other, ok := comparisons[n.Op]; ok {
				left, right := text(n.X), text(n.Y)
				add(n, left+" "+other+" "+right, fmt.Sprintf("%s for %s: %s", other, n.Op, brief(text(n))))
			}
		case *ast.AssignStmt:
			if n.Tok != token.DEFINE && !blank(n.Lhs) {
				blanks := strings.TrimSuffix(strings.Repeat("_, ", len(n.Lhs)), ", ")
				right := string(src[at(n.Rhs[0].Pos()):at(n.Rhs[len(n.Rhs)-1].End())])
				add(n, blanks+" = "+right, "value dropped: "+brief(text(n)))
			}
		case *ast.IncDecStmt:
			add(n, "{ }", "dropped: "+brief(text(n)))
		case *ast.ExprStmt:
			if !isPanic(n.X) {
				add(n, "{ }", "dropped: "+brief(text(n)))
			}
		}
		return true
	})
	return all, nil
}

var comparisons = map[token.Token]string{token.LSS: "<=", token.LEQ: "<", token.GTR: ">=", token.GEQ: ">"}

// leaves reports whether a block ends by leaving the function or the loop.
func leaves(b *ast.BlockStmt) bool {
	if len(b.List) == 0 {
		return false
	}
	switch last := b.List[len(b.List)-1].(type) {
	case *ast.ReturnStmt, *ast.BranchStmt:
		return true
	case *ast.ExprStmt:
		return isPanic(last.X)
	}
	return false
}

func isPanic(x ast.Expr) bool {
	call, ok := x.(*ast.CallExpr)
	if !ok {
		return false
	}
	name, ok := call.Fun.(*ast.Ident)
	return ok && name.Name == "panic"
}

// blank reports whether an assignment drops all its values.
func blank(left []ast.Expr) bool {
	for _, x := range left {
		if name, ok := x.(*ast.Ident); !ok || name.Name != "_" {
			return false
		}
	}
	return true
}

// brief shortens code to one line.
func brief(code string) string {
	line := strings.Join(strings.Fields(code), " ")
	if len(line) > 100 {
		line = line[:97] + "..."
	}
	return line
}
