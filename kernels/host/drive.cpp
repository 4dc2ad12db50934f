#include "drive.hpp"

#include <csignal>
#include <system_error>
#include <utility>

#include <pthread.h>

namespace tutti {

Drive::Drive(std::uint16_t ordinal, const tutti_options &options)
    : queue({options.segment_size, options.queue_depth}), ordinal_(ordinal), options_(options), faults_(options.faults) {}

bool Drive::start(std::string name, void (*body)(Drive &)) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // a new thread inherits the mask: the process's handlers run elsewhere
    bool started = true;
    try {
        threads_.emplace_back([self = shared_from_this(), body] { body(*self); });
        pthread_setname_np(threads_.back().native_handle(), name.substr(0, 15).c_str());
    } catch (const std::system_error &) {  // EAGAIN: the limit of processes of a user or a container
        started = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
}

void Drive::stop(bool join) {
    stopping_.store(true, std::memory_order_release);
    wake();
    for (auto &thread : std::exchange(threads_, {})) {
        if (join)
            thread.join();
        else
            thread.detach();
    }
    if (join) ended();
}

}  // namespace tutti
