package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"

	wald "wald.dev/client/go"
)

type step = object

// run is one case underway.
type run struct {
	client *wald.Client
	names  names

	mutex     sync.Mutex
	followers map[string]*follower
	producers map[string]*wald.Producer
	jobs      map[string]chan error
	// last is the step that began last, for the error of a case that takes too long.
	last string
}

func newRun(client *wald.Client, name string) *run {
	prefix := fmt.Sprintf("conformance/%s/%s/", name, rand.Text()[:8])
	return &run{
		client:    client,
		names:     names{prefix: prefix, kept: given()},
		followers: make(map[string]*follower),
		producers: make(map[string]*wald.Producer),
		jobs:      make(map[string]chan error),
	}
}

// close frees the resources that the case has left open.
func (r *run) close() {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for _, follower := range r.followers {
		follower.close()
	}
	for _, producer := range r.producers {
		// No step waits for batches that are not acked by now.
		_ = producer.Close(ctx)
	}
}

func (r *run) steps(ctx context.Context, steps []step, names names) error {
	for i, step := range steps {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		r.mutex.Lock()
		r.last = fmt.Sprintf("step %d (%v)", i+1, step["do"])
		r.mutex.Unlock()
		if err := r.step(ctx, step, names); err != nil {
			return fmt.Errorf("step %d (%v): %w", i+1, step["do"], err)
		}
	}
	return nil
}

// step does one step and compares its result.
func (r *run) step(ctx context.Context, raw step, names names) error {
	do, _ := raw["do"].(string)
	switch do {
	case "repeat":
		return r.repeat(ctx, raw, names)
	case "background":
		return r.background(ctx, raw, names)
	}
	action, known := actions[do]
	if !known {
		return errors.New("unknown")
	}
	resolved, err := names.resolve(raw)
	if err != nil {
		return err
	}
	arguments := arguments{members: resolved.(object)}
	began := time.Now()
	result, err := action(ctx, r, &arguments)
	took := time.Since(began)
	if limit := arguments.optional("within_ms"); limit != nil && took > time.Duration(*limit)*time.Millisecond {
		return fmt.Errorf("took %v, at most %d ms are allowed", took, *limit)
	}
	if arguments.err != nil {
		return arguments.err
	}
	if err := judge(arguments.members, result, err); err != nil {
		return err
	}
	if name, kept := raw["as"].(string); kept {
		names.kept[name] = result
	}
	return nil
}

// judge compares the result of a step with the expected one.
func judge(step object, result object, err error) error {
	expected, fails := step["fails"]
	if !fails {
		if err != nil {
			return err
		}
		if expected, given := step["expect"]; given {
			factsAsStrings(expected)
			if difference := differ("", expected, result); difference != "" {
				return errors.New(difference)
			}
		}
		return nil
	}
	if err == nil {
		return fmt.Errorf("expected to fail with %s, got %s", show(expected), show(result))
	}
	var failure *wald.Error
	if !errors.As(err, &failure) {
		return err
	}
	factsAsStrings(expected)
	if difference := differ("", expected, describe(failure)); difference != "" {
		return fmt.Errorf("%s (%v)", difference, err)
	}
	return nil
}

// factsAsStrings: ErrorInfo has nothing but strings, cases also numbers.
func factsAsStrings(expected any) {
	members, _ := expected.(object)
	for name, member := range members {
		if facts, ok := member.(object); ok && name == "facts" {
			for name, fact := range facts {
				facts[name] = fmt.Sprint(fact)
			}
		}
		factsAsStrings(member)
	}
}

// describe is an error as cases see it.
func describe(e *wald.Error) object {
	facts := object{}
	for name, fact := range e.Facts {
		facts[name] = fact
	}
	failed := []any{}
	for _, check := range e.Failed {
		failed = append(failed, object{
			"reason":      string(check.Reason),
			"log":         check.Log,
			"description": check.Description,
		})
	}
	return object{
		"code":    code.Code(e.Code).String(),
		"reason":  string(e.Reason),
		"outcome": string(e.Outcome),
		"retry":   string(e.Retry),
		"facts":   facts,
		"failed":  failed,
		"problem": problem(e),
	}
}

// problem is the reason of a failure of TLS or of a token.
func problem(e *wald.Error) string {
	if errors.Is(e, wald.ErrToken) {
		return "TOKEN"
	}
	return string(e.TLS)
}

// given are the names that the harness gives to every case.
func given() object {
	names := object{}
	for _, name := range []string{"server", "plain_server", "expired_server", "other_ca", "other_cert", "other_key"} {
		if value, ok := os.LookupEnv("WALD_CASE_" + strings.ToUpper(name)); ok {
			names[name] = value
		}
	}
	return names
}

func (r *run) repeat(ctx context.Context, raw step, names names) error {
	times, err := names.resolve(raw["times"])
	if err != nil {
		return err
	}
	count, err := strconv.Atoi(fmt.Sprint(times))
	if err != nil {
		return err
	}
	steps := toSteps(raw["steps"])
	for i := range count {
		names.kept["i"] = num(i)
		if err := r.steps(ctx, steps, names); err != nil {
			return fmt.Errorf("turn %d: %w", i, err)
		}
	}
	return nil
}

func (r *run) background(ctx context.Context, raw step, names names) error {
	done := make(chan error, 1)
	r.mutex.Lock()
	r.jobs[fmt.Sprint(raw["as"])] = done
	r.mutex.Unlock()
	beside := names.with("i", names.kept["i"])
	go func() { done <- r.steps(ctx, toSteps(raw["steps"]), beside) }()
	return nil
}

func toSteps(value any) []step {
	list, _ := value.([]any)
	steps := make([]step, len(list))
	for i, element := range list {
		steps[i], _ = element.(object)
	}
	return steps
}

// arguments are the members of a step. The first error among them is kept as err.
type arguments struct {
	members object
	err     error
}

func (a *arguments) has(name string) bool {
	_, there := a.members[name]
	return there
}

func (a *arguments) text(name string) string {
	value, ok := a.members[name].(string)
	if !ok && a.has(name) {
		a.wrong(name)
	}
	return value
}

func (a *arguments) flag(name string) bool {
	value, ok := a.members[name].(bool)
	if !ok && a.has(name) {
		a.wrong(name)
	}
	return value
}

func (a *arguments) number(name string) uint64 {
	if !a.has(name) {
		return 0
	}
	value, err := strconv.ParseUint(fmt.Sprint(a.members[name]), 10, 64)
	if err != nil {
		a.wrong(name)
	}
	return value
}

// optional is nil if the argument is not given.
func (a *arguments) optional(name string) *uint64 {
	if !a.has(name) {
		return nil
	}
	value := a.number(name)
	return &value
}

func (a *arguments) bytes(name string) []byte {
	value, ok := a.members[name].([]byte)
	if !ok {
		a.wrong(name)
	}
	return value
}

// each calls back with the elements of a list of objects.
func (a *arguments) each(name string, element func(*arguments)) {
	list, ok := a.members[name].([]any)
	if !ok && a.has(name) {
		a.wrong(name)
	}
	for _, one := range list {
		members, ok := one.(object)
		if !ok {
			a.wrong(name)
			return
		}
		inner := &arguments{members: members}
		element(inner)
		if inner.err != nil {
			a.err = inner.err
		}
	}
}

func (a *arguments) wrong(name string) {
	if a.err == nil {
		a.err = fmt.Errorf("argument %s: not %s", name, show(a.members[name]))
	}
}

// shortName is the name of an enumeration's value without its prefix.
func shortName(value fmt.Stringer, prefix string) string {
	return strings.TrimPrefix(value.String(), prefix)
}
